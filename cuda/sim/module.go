package sim

import (
	"bytes"
	"errors"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// module is loaded PTX. Only its entries' names and parameters matter: what an
// entry does is what the Go function does that is registered under its name.
type module struct {
	handle  driver.Module
	context *gpuContext
	object  *object
	entries map[string]entry
	globals map[string]*backing
}

type function struct {
	module *module
	entry  entry
	// dynamic is the most dynamic shared memory that a launch may ask for.
	dynamic uint64
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
		m.explain(call, "module: the software driver runs no binary code; give it the PTX")
		return 0, "", driver.NoBinaryForGPU
	case !isPTX(string(text)):
		return 0, "", driver.InvalidImage
	}
	entries, err := parsePTX(string(text), compiler{
		newest: newestPTX(m.options.DriverVersion),
		target: 10*int(ctx.device.attributes[driver.AttrComputeMajor]) + int(ctx.device.attributes[driver.AttrComputeMinor]),
	})
	if err != nil {
		m.explain(call, "module: %v", err)
		if errors.Is(err, errPTXVersion) {
			return 0, err.Error(), driver.UnsupportedPTX
		}
		return 0, err.Error(), driver.InvalidPTX
	}
	mod := &module{handle: driver.Module(newHandle()), context: ctx, entries: entries}
	if why, r := ctx.place(mod, string(text)); r != driver.Success {
		return 0, why, r
	}
	mod.object = m.track(KindModule, uint64(mod.handle), 0)
	m.modules[mod.handle] = mod
	return mod.handle, "", driver.Success
}

// ModuleUnload unloads the module's functions too. Launches that were submitted before are
// still done.
func (a *api) ModuleUnload(c driver.Context, h driver.Module) driver.Result {
	owner := func() *gpuContext {
		if mod := a.m.modules[h]; mod != nil {
			return mod.context
		}
		return nil
	}
	if _, r := a.enterToDestroy(driver.CallModuleUnload, c, owner); r != driver.Success {
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
		m.explain(driver.CallModuleGetFunction, "kernel %s has no Go function to stand for it; register one with RegisterKernel", name)
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
