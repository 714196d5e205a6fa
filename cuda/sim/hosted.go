package sim

import (
	"maps"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
)

var _ driver.Hosted = (*api)(nil)

func (a *api) NewThread() {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	delete(a.m.threads, host.ThreadID())
}

func (a *api) WithoutFunction(h driver.Module) []string {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	mod := a.m.modules[h]
	if mod == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Sorted(maps.Keys(mod.entries)), func(name string) bool { return kernelTwin(name) != nil })
}

func (a *api) KernelParams(h driver.Function) []driver.KernelParam {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	f := a.m.functions[h]
	if f == nil {
		return nil
	}
	var all []driver.KernelParam
	for _, p := range f.entry.params {
		all = append(all, driver.KernelParam{Offset: p.offset, Size: p.size})
	}
	return all
}
