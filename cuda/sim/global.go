package sim

import (
	"encoding/binary"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/cuvmm/cuvmm/internal/driver"
)

var ptxGlobal = regexp.MustCompile(`\.(?:global|const)\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)\s+([A-Za-z0-9_$%]+)\s*(?:\[\s*(\d+)\s*\])?\s*(?:=\s*([^;]*))?;`)

// place gives a module's variables memory, with the values that they begin with.
func (c *gpuContext) place(mod *module, text string) (why string, r driver.Result) {
	undo := func(why string, r driver.Result) (string, driver.Result) {
		c.m.note("module: %s", why)
		c.m.forgetGlobals(mod)
		return why, r
	}
	mod.globals = map[string]*backing{}
	for _, found := range ptxGlobal.FindAllStringSubmatch(ptxComment.ReplaceAllString(text, " "), -1) {
		name := found[2]
		size, err := sizeOf(found[1], found[3])
		if err != nil {
			return undo(fmt.Sprintf("variable %s: %v", name, err), driver.InvalidPTX)
		}
		values, err := initial(found[4], found[1], size)
		if err != nil {
			return undo(fmt.Sprintf("variable %s: %v", name, err), driver.InvalidPTX)
		}
		g, r := c.allocate(size)
		if r != driver.Success {
			return undo("no memory for variable "+name, r)
		}
		g.owner = mod // which alone frees it
		c.m.untrack(g.object)
		mod.globals[name] = g
		at, f := c.m.locate(site{gpuContext: c, stream: c.legacy}, driver.CallModuleLoadData, g.lo, size, driver.AccessReadWrite)
		if f != nil {
			return undo(f.text, f.result)
		}
		copyRuns(at.runs, [][]byte{values})
	}
	return "", driver.Success
}

// initial returns the bytes that a variable of so many bits an element begins with:
// zeros but for a list of whole numbers.
func initial(list, bits string, size uint64) ([]byte, error) {
	width, err := strconv.Atoi(bits)
	if err != nil || width > 64 {
		return nil, fmt.Errorf("%s bits are no number", bits)
	}
	out := make([]byte, 0, size)
	if list = strings.Trim(strings.TrimSpace(list), "{}"); list != "" {
		for value := range strings.SplitSeq(list, ",") {
			value = strings.TrimSpace(value)
			n, err := strconv.ParseInt(value, 0, 64)
			if err != nil {
				u, wide := strconv.ParseUint(value, 0, 64)
				if wide != nil {
					return nil, fmt.Errorf("the software driver reads whole numbers only, not %q", value)
				}
				n = int64(u)
			}
			out = append(out, binary.LittleEndian.AppendUint64(nil, uint64(n))[:width/8]...)
		}
	}
	if uint64(len(out)) > size {
		return nil, fmt.Errorf("%d bytes of values for %d", len(out), size)
	}
	return append(out, make([]byte, size-uint64(len(out)))...), nil
}

func (m *Machine) forgetGlobals(mod *module) {
	for _, g := range mod.globals {
		m.evict(g)
	}
	mod.globals = nil
}

// ModuleGetGlobal finds a variable that the PTX declares.
func (a *api) ModuleGetGlobal(c driver.Context, h driver.Module, name string) (driver.Ptr, uint64, driver.Result) {
	if _, r := a.enterContext(driver.CallModuleGetGlobal, c); r != driver.Success {
		return 0, 0, r
	}
	defer a.leave()
	mod := a.m.modules[h]
	if mod == nil {
		return 0, 0, driver.InvalidHandle
	}
	g := mod.globals[name]
	if g == nil {
		return 0, 0, driver.NotFound
	}
	return driver.Ptr(g.lo), g.hi - g.lo, driver.Success
}

// Global returns the address of a variable that the kernel's module declares.
func (k *Kernel) Global(name string) uint64 {
	g := k.globals[name]
	if g == nil {
		panic(fmt.Sprintf("the module of %s declares no variable %s", k.Name, name))
	}
	return g.lo
}
