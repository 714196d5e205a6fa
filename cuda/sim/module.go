package sim

import (
	"bytes"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// module is loaded PTX. Only its entries' names and parameters matter: what an
// entry does is what the Go function does that is registered under its name.
type module struct {
	handle  driver.Module
	context *gpuContext
	object  *object
	entries map[string]entry
	globals map[string]*resident
}

// entry is the declaration of a kernel in PTX.
type entry struct {
	name   string
	params []param
	size   uint64 // of all parameters in one block
	shared uint64 // static, of each block
}

// param is where a parameter lies in the block of parameters.
type param struct{ offset, size uint64 }

type function struct {
	module *module
	entry  entry
	// dynamic is the most dynamic shared memory that a launch may ask for.
	dynamic uint64
}

var (
	ptxComment = regexp.MustCompile(`(?s)//[^\n]*|/\*.*?\*/`)
	ptxVersion = regexp.MustCompile(`\.version\s+\d+\.\d+`)
	ptxTarget  = regexp.MustCompile(`\.target\s+sm_(\d+)`)
	ptxEntry   = regexp.MustCompile(`\.entry\b`)
	ptxHead    = regexp.MustCompile(`^\s+([A-Za-z][A-Za-z0-9_$]*|[_$%][A-Za-z0-9_$]+)\s*(?:\(([^(){};]*)\))?((?:\s*\.[a-z_]+(?:\s+(?:\d+(?:\s*,\s*\d+)*|"[^"]*"))?)*)\s*([{;])`)
	ptxParam   = regexp.MustCompile(`^\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)\s+(?:\.ptr\s+(?:\.[a-z]+\s+)*(?:\.align\s+\d+\s+)?)?[A-Za-z0-9_$%]+\s*(?:\[\s*(\d+)\s*\])?$`)
)

// parsePTX reads the declarations out of PTX text.
func parsePTX(text string) (entries map[string]entry, target int, err error) {
	text = ptxComment.ReplaceAllString(text, " ")
	if !ptxVersion.MatchString(text) {
		return nil, 0, fmt.Errorf("the PTX has no .version directive")
	}
	sm := ptxTarget.FindStringSubmatch(text)
	if sm == nil {
		return nil, 0, fmt.Errorf("the PTX has no .target sm_ directive")
	}
	if target, err = strconv.Atoi(sm[1]); err != nil {
		return nil, 0, err
	}
	entries = map[string]entry{}
	for {
		at := ptxEntry.FindStringIndex(text)
		if at == nil {
			return entries, target, nil
		}
		text = text[at[1]:]
		found := ptxHead.FindStringSubmatch(text)
		if found == nil {
			return nil, 0, fmt.Errorf("the entry at %.40q is not a name, parameters in parentheses, directives and a body", text)
		}
		e := entry{name: found[1]}
		if _, ok := entries[e.name]; ok {
			return nil, 0, fmt.Errorf("entry %s is there twice", e.name)
		}
		text = text[len(found[0]):]
		if found[4] == ";" {
			continue // only a declaration
		}
		body := text
		if text, err = skipBody(text); err != nil {
			return nil, 0, fmt.Errorf("entry %s: %w", e.name, err)
		}
		if e.shared, err = sharedOf(body[:len(body)-len(text)]); err != nil {
			return nil, 0, fmt.Errorf("entry %s: %w", e.name, err)
		}
		if list := strings.TrimSpace(found[2]); list != "" {
			for _, declared := range strings.Split(list, ",") {
				if err := e.add(strings.TrimSpace(declared)); err != nil {
					return nil, 0, fmt.Errorf("entry %s: %w", e.name, err)
				}
			}
		}
		entries[e.name] = e
	}
}

// skipBody returns what follows the body of an entry, whose opening brace was
// read. Of the body it only sees whether it is cut short.
func skipBody(text string) (rest string, err error) {
	for depth, i := 1, 0; i < len(text); i++ {
		switch text[i] {
		case '{':
			depth++
		case '}':
			if depth--; depth > 0 {
				continue
			}
			body := strings.TrimSpace(text[:i])
			if ptxEntry.MatchString(body) {
				return "", fmt.Errorf("another entry begins in its body")
			}
			if body != "" && !strings.ContainsRune(";:}", rune(body[len(body)-1])) {
				return "", fmt.Errorf("the last statement of its body has no end")
			}
			return text[i+1:], nil
		}
	}
	return "", fmt.Errorf("its body has no end")
}

// add appends a parameter, in the layout that the driver gives the block.
func (e *entry) add(declared string) error {
	part := ptxParam.FindStringSubmatch(declared)
	if part == nil {
		return fmt.Errorf("parameter %q is not understood", declared)
	}
	bits, err := strconv.ParseUint(part[3], 10, 16)
	if err != nil || bits%8 != 0 || bits == 0 {
		return fmt.Errorf("parameter %q: %d bits are no whole bytes", declared, bits)
	}
	size, align := bits/8, bits/8
	if part[1] != "" {
		if align, err = strconv.ParseUint(part[1], 10, 16); err != nil || align == 0 || align&(align-1) != 0 {
			return fmt.Errorf("parameter %q: the alignment is no power of two", declared)
		}
	}
	if part[4] != "" {
		n, err := strconv.ParseUint(part[4], 10, 32)
		if err != nil {
			return fmt.Errorf("parameter %q: %w", declared, err)
		}
		size *= n
	}
	p := param{roundUp(e.size, align), size}
	e.params = append(e.params, p)
	e.size = p.offset + p.size
	return nil
}

func (a *api) ModuleLoadData(c driver.Context, image []byte) (driver.Module, driver.Result) {
	mod, _, r := a.load(driver.CallModuleLoadData, c, image)
	return mod, r
}

func (a *api) ModuleLoadDataEx(c driver.Context, image, log []byte) (driver.Module, driver.Result) {
	mod, why, r := a.load(driver.CallModuleLoadDataEx, c, image)
	log[copy(log[:len(log)-1], why)] = 0
	return mod, r
}

// load loads a module, or says what is wrong with PTX.
func (a *api) load(call driver.Call, c driver.Context, image []byte) (driver.Module, string, driver.Result) {
	ctx, r := a.enterContext(call, c)
	if r != driver.Success {
		return 0, "", r
	}
	defer a.leave()
	m := a.m
	text, _, _ := bytes.Cut(image, []byte{0}) // PTX ends there
	switch {
	case bytes.HasPrefix(text, []byte("\x7fELF")):
		m.note("module: the software driver runs no binary code; give it the PTX")
		return 0, "", driver.NoBinaryForGPU
	case !bytes.Contains(text, []byte(".version")):
		return 0, "", driver.InvalidImage
	}
	entries, target, err := parsePTX(string(text))
	if err != nil {
		m.note("module: %v", err)
		return 0, err.Error(), driver.InvalidPTX
	}
	has := 10*ctx.device.attributes[driver.AttrComputeMajor] + ctx.device.attributes[driver.AttrComputeMinor]
	if int32(target) > has {
		why := fmt.Sprintf("the PTX is for sm_%d, device %d is sm_%d", target, ctx.device.ordinal, has)
		m.note("module: %s", why)
		return 0, why, driver.NoBinaryForGPU
	}
	mod := &module{handle: driver.Module(newHandle()), context: ctx, entries: entries}
	if why, r := ctx.place(mod, string(text)); r != driver.Success {
		return 0, why, r
	}
	mod.object = m.track(KindModule, uint64(mod.handle), 0)
	m.modules[mod.handle] = mod
	return mod.handle, "", driver.Success
}

// ModuleUnload takes the module's functions along. Launches that are still to
// be done are done.
func (a *api) ModuleUnload(c driver.Context, h driver.Module) driver.Result {
	if _, r := a.enterNamed(driver.CallModuleUnload, c); r != driver.Success {
		return r
	}
	defer a.leave()
	mod := a.m.modules[h]
	if mod == nil {
		return driver.InvalidHandle
	}
	if len(mod.globals) > 0 { // work under way may use them
		mod.context.drainAlone()
		if a.m.closed {
			return driver.Deinitialized
		}
		if a.m.modules[h] != mod {
			return driver.InvalidHandle
		}
	}
	a.m.untrack(mod.object)
	a.m.dropModule(mod)
	return mod.context.lost
}

func (m *Machine) dropModule(mod *module) {
	delete(m.modules, mod.handle)
	m.forgetGlobals(mod)
	for h, f := range m.functions {
		if f.module == mod {
			delete(m.functions, h)
		}
	}
}

// ModuleGetFunction knows an entry if the PTX declares it and a Go function is
// registered under its name.
func (a *api) ModuleGetFunction(c driver.Context, h driver.Module, name string) (driver.Function, driver.Result) {
	if _, r := a.enterContext(driver.CallModuleGetFunction, c); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	m := a.m
	mod := m.modules[h]
	if mod == nil {
		return 0, driver.InvalidHandle
	}
	e, ok := mod.entries[name]
	switch {
	case !ok:
		return 0, driver.NotFound
	case kernelTwin(name) == nil:
		m.note("kernel %s has no Go function to stand for it; register one with RegisterKernel", name)
		return 0, driver.NotSupported
	}
	for h, f := range m.functions {
		if f.module == mod && f.entry.name == name {
			return h, driver.Success
		}
	}
	f := driver.Function(newHandle())
	m.functions[f] = &function{mod, e, maxSharedBytes - min(maxSharedBytes, e.shared)}
	return f, driver.Success
}

// FuncGetParamInfo reads what the PTX declares.
func (a *api) FuncGetParamInfo(c driver.Context, h driver.Function, index uint64) (offset, size uint64, r driver.Result) {
	if _, r := a.enterContext(driver.CallFuncGetParamInfo, c); r != driver.Success {
		return 0, 0, r
	}
	defer a.leave()
	f := a.m.functions[h]
	switch {
	case f == nil:
		return 0, 0, driver.InvalidHandle
	case index >= uint64(len(f.entry.params)):
		return 0, 0, driver.InvalidValue
	}
	p := f.entry.params[index]
	return p.offset, p.size, driver.Success
}
