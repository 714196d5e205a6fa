package cuda

import (
	"fmt"
	"math"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// sharedDefault is what a block can have, static and dynamic memory together,
// without a driver call that allows its kernel more.
const sharedDefault = 48 << 10

// sharedMemory is what is known of a kernel's shared memory.
type sharedMemory struct {
	mu     lock.Mutex[lock.Long]
	known  bool
	static int // bytes that every block has, in every launch
	most   int // dynamic bytes that a launch can ask for
	raised bool
}

// MaxShared returns how many bytes of dynamic shared memory a launch of the kernel
// can ask for: what the device lets a block have, less the kernel's static shared
// memory.
func (k *Kernel) MaxShared() (int, error) {
	const op = "cuda.Kernel.MaxShared"
	m, err := k.acquire(op)
	if err != nil {
		return 0, err
	}
	defer m.closer.Release()
	k.shared.mu.Lock()
	defer k.shared.mu.Unlock()
	err = k.measure(op)
	return k.shared.most, err
}

// measure queries the kernel's shared memory, once. The caller holds
// shared.mu and the module.
func (k *Kernel) measure(op string) error {
	if k.shared.known {
		return nil
	}
	ctx := k.module.ctx
	sys := ctx.System()
	static, r := sys.Drv.FuncGetAttribute(ctx.Handle, driver.FuncSharedBytes, k.function)
	if r != driver.Success {
		return ctx.CallError(op, driver.CallFuncGetAttribute, r, fmt.Sprintf("kernel %q", k.name))
	}
	limit, r := sys.ReadAttribute(k.module.dev.dev, driver.AttrSharedPerBlockOptIn)
	if r != driver.Success {
		return ctx.CallError(op, driver.CallDeviceGetAttribute, r, fmt.Sprintf("the shared memory of %v", k.module.dev))
	}
	limit = max(limit, sharedDefault)
	k.shared.static, k.shared.most, k.shared.known = int(static), max(0, int(limit)-int(static)), true
	return nil
}

// allow has the driver allow launches with so much dynamic shared memory. A launch
// that fits into what every kernel has makes no driver call but the first.
func (k *Kernel) allow(op string, bytes int) error {
	if bytes == 0 {
		return nil
	}
	k.shared.mu.Lock()
	defer k.shared.mu.Unlock()
	if err := k.measure(op); err != nil {
		return err
	}
	switch s := &k.shared; {
	case bytes > s.most:
		return errs.Invalid(op, fmt.Sprintf("%d bytes of dynamic shared memory for kernel %q, which has %d static ones", bytes, k.name, s.static),
			fmt.Sprintf("a launch of it on %v can ask for 0 to %d bytes", k.module.dev, s.most))
	case s.raised || s.static+bytes <= sharedDefault:
		return nil
	}
	ctx := k.module.ctx
	r := ctx.System().Drv.FuncSetAttribute(ctx.Handle, k.function, driver.FuncMaxDynamicSharedBytes, int32(k.shared.most))
	if r != driver.Success {
		return ctx.CallError(op, driver.CallFuncSetAttribute, r, fmt.Sprintf("%d bytes of dynamic shared memory for kernel %q", k.shared.most, k.name))
	}
	k.shared.raised = true
	return nil
}

// cooperates refuses cooperative launches that the driver or the device lacks.
func (k *Kernel) cooperates(op string) error {
	sys := k.module.ctx.System()
	var asked, hint string
	switch {
	case !sys.Drv.Has(driver.CallLaunchKernelEx):
		asked, hint = fmt.Sprintf("a cooperative launch by a driver for CUDA %s", driver.VersionString(sys.Version)), "update the driver to CUDA 11.8 or later"
	case sys.Attribute(k.module.dev.dev, driver.AttrCooperativeLaunch) == 0:
		asked, hint = fmt.Sprintf("a cooperative launch on %v", k.module.dev), "the device has none: let blocks not wait for each other"
	default:
		return nil
	}
	return errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: asked, Hint: hint})
}

// BlocksAtOnce returns how many blocks with the launch's Block and SharedBytes the
// device runs at once while nothing else runs: the largest grid of a cooperative
// launch.
func (k *Kernel) BlocksAtOnce(l Launch) (int, error) {
	const op = "cuda.Kernel.BlocksAtOnce"
	m, err := k.acquire(op)
	if err != nil {
		return 0, err
	}
	defer m.closer.Release()
	l.Grid = [3]int{1, 1, 1}
	config, err := l.config(op)
	if err != nil {
		return 0, err
	}
	if err := k.allow(op, l.SharedBytes); err != nil {
		return 0, err
	}
	sys := m.ctx.System()
	threads := config.BlockX * config.BlockY * config.BlockZ
	each, r := sys.Drv.OccupancyMaxActiveBlocksPerMultiprocessor(m.ctx.Handle, k.function, int32(threads), uint64(config.SharedBytes))
	if r != driver.Success {
		return 0, m.ctx.CallError(op, driver.CallOccupancyMaxActiveBlocksPerMultiprocessor, r, fmt.Sprintf("kernel %q with blocks of %v", k.name, l.Block))
	}
	return min(int(each)*int(sys.Attribute(m.dev.dev, driver.AttrMultiprocessorCount)), math.MaxInt32), nil
}
