package cuda

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
)

// Module is GPU code that was loaded into a device's context: its kernels run
// on streams of that context.
type Module struct {
	obj     *core.Object
	closer  life.Closer
	dev     *Device
	ctx     *core.Context
	handle  driver.Module
	ptx     bool // the driver compiled it, and so knows what its kernels declare
	watched life.Watched
}

// LoadModule loads PTX text, a cubin or a fat binary. The driver compiles PTX
// for the device, which takes milliseconds the first time, and copies what it
// needs of the image. What the compiler has against PTX is in the error. The
// caller closes the module.
//
// The software driver takes PTX text alone. It reads the entries' names and
// parameters; what an entry does there is the Go function that was registered
// under its name with sim.RegisterKernel.
func (d *Device) LoadModule(image []byte) (*Module, error) {
	const op = "cuda.Device.LoadModule"
	if err := d.open(op); err != nil {
		return nil, err
	}
	if err := checkImage(op, image); err != nil {
		return nil, err
	}
	c, err := d.context(op)
	if err != nil {
		return nil, err
	}
	_, isBinary := imageEnd(image)
	if !isBinary {
		image = ptxText(image)
	}
	sys := d.sys.core
	sys.PollReclaim()
	h, r := sys.Drv.ModuleLoadData(c.Handle, image)
	if r != driver.Success {
		asked := fmt.Sprintf("%s on %v, sm_%d%d, by a driver for CUDA %s",
			describeImage(image), d, sys.Attribute(d.dev, driver.AttrComputeMajor),
			sys.Attribute(d.dev, driver.AttrComputeMinor), driver.VersionString(sys.Version))
		if says := compilerSays(c, image, r); says != nil {
			return nil, errs.New(errs.Failure{Op: op, Call: driver.CallModuleLoadData, Result: r, Asked: asked, Err: says})
		}
		return nil, c.CallError(op, driver.CallModuleLoadData, r, asked)
	}
	m := &Module{obj: new(core.Object), dev: d, ctx: c, handle: h, ptx: !isBinary}
	sys.Track(m.obj, life.KindModule, uint64(len(image)))
	m.obj.Watch(&m.watched)
	return m, nil
}

// compilerSays returns what the driver's compiler reports of PTX that the driver refused,
// or nil. A log needs a second load, of another form, so only a refusal leads to one.
func compilerSays(c *core.Context, image []byte, r driver.Result) error {
	switch r {
	case driver.InvalidPTX, driver.UnsupportedPTX, driver.NoBinaryForGPU, driver.InvalidImage:
	default:
		return nil
	}
	if _, isBinary := imageEnd(image); isBinary {
		return nil
	}
	drv, log := c.System().Drv, make([]byte, 8<<10)
	h, again := drv.ModuleLoadDataEx(c.Handle, image, log)
	if c.Observe(again) == driver.Success {
		_ = unloading(c, h).After(nil)
		return nil
	}
	text, _, _ := bytes.Cut(log, []byte{0})
	var lines []string
	for line := range strings.Lines(string(text)) {
		if words := strings.Fields(line); len(words) > 0 {
			lines = append(lines, strings.Join(words, " "))
		}
	}
	if len(lines) == 0 {
		return nil
	}
	return errors.New("the compiler says: " + strings.Join(lines, "; "))
}

// Kernel finds a kernel by the name of its entry. It lives as long as the
// module, and needs no Close.
func (m *Module) Kernel(name string) (*Kernel, error) {
	const op = "cuda.Module.Kernel"
	if err := m.acquire(op); err != nil {
		return nil, err
	}
	defer m.closer.Release()
	if name == "" || strings.ContainsRune(name, 0) {
		return nil, errs.Invalid(op, fmt.Sprintf("the name %q", name), "pass the name of a PTX entry")
	}
	sys := m.ctx.System()
	f, r := sys.Drv.ModuleGetFunction(m.ctx.Handle, m.handle, name)
	if r != driver.Success {
		return nil, m.ctx.CallError(op, driver.CallModuleGetFunction, r, fmt.Sprintf("kernel %q", name))
	}
	declared, known := m.parameters(f)
	return &Kernel{module: m, name: name, function: f, declared: declared, known: known}, nil
}

// Global returns the address and the size in bytes of a variable that the module
// declares as global or constant memory. Copies and kernels of the module's device
// use it like any memory, until the module is closed.
func (m *Module) Global(name string) (Ptr, int, error) {
	const op = "cuda.Module.Global"
	if err := m.acquire(op); err != nil {
		return 0, 0, err
	}
	defer m.closer.Release()
	if name == "" || strings.ContainsRune(name, 0) {
		return 0, 0, errs.Invalid(op, fmt.Sprintf("the name %q", name), "pass the name of a variable of the PTX")
	}
	p, n, r := m.ctx.System().Drv.ModuleGetGlobal(m.ctx.Handle, m.handle, name)
	if r != driver.Success {
		return 0, 0, m.ctx.CallError(op, driver.CallModuleGetGlobal, r, fmt.Sprintf("variable %q", name))
	}
	return Ptr(p), int(n), nil
}

// parameters returns what a kernel declares: where each parameter lies in the block of
// parameters. They are not known if the driver lists none that can be. An empty list is
// believed of PTX only: for a binary the driver knows no more than what the tool that
// made it put there.
func (m *Module) parameters(f driver.Function) (declared []parameter, known bool) {
	sys := m.ctx.System()
	if !sys.Drv.Has(driver.CallFuncGetParamInfo) {
		return nil, false
	}
	for end := uint64(0); ; {
		off, size, r := sys.Drv.FuncGetParamInfo(m.ctx.Handle, f, uint64(len(declared)))
		if r == driver.InvalidValue {
			return declared, len(declared) > 0 || m.ptx
		}
		if m.ctx.Observe(r) != driver.Success || off < end || len(declared) == 0 && off > 0 ||
			size == 0 || off > maxParameters || size > maxParameters-off {
			return nil, false
		}
		end = off + size
		declared = append(declared, parameter{int(off), int(size)})
	}
}

// inner returns the module, or an error for one that no function made.
func (m *Module) inner(op string) (*Module, error) {
	if m == nil || m.ctx == nil {
		return nil, errs.Invalid(op, "a nil module", "make one with Device.LoadModule")
	}
	return m, nil
}

// acquire starts an operation on the module; the caller calls closer.Release.
func (m *Module) acquire(op string) error {
	if _, err := m.inner(op); err != nil {
		return err
	}
	if !m.closer.Acquire() {
		return errs.ClosedError(op, "module")
	}
	return nil
}

// Device returns the device that the module was loaded with.
func (m *Module) Device() *Device { return m.dev }

// Close waits for all GPU work on the device, since some of it could be the
// module's kernels, and unloads the module. What it waits for, and what that
// costs, is as in the vmm package; CloseAfter is the fast way. Graphs that
// captured a launch of its kernels must be closed first.
func (m *Module) Close() error {
	const op = "cuda.Module.Close"
	if _, err := m.inner(op); err != nil {
		return err
	}
	return m.closer.Close(func() error {
		if err := m.ctx.System().WaitDevices(op, []driver.Device{m.dev.dev}); err != nil {
			return err
		}
		return m.unload(op)
	})
}

// CloseAfter takes the module out of use at once and unloads it when the work
// that is on the streams now is done. It never blocks. Without a stream it is
// ErrInvalidArgument; with one that captures a graph it is ErrCapturing and
// nothing has changed. Graphs that captured a launch of its kernels must be
// closed first.
func (m *Module) CloseAfter(streams ...*Stream) error {
	const op = "cuda.Module.CloseAfter"
	if _, err := m.inner(op); err != nil {
		return err
	}
	sys := m.ctx.System()
	return life.CloseAfter(&m.closer, sys,
		func() (*core.Fence, error) { return core.FenceOf(sys, op, streams) },
		func() error { return m.unload(op) })
}

// Released returns the end of the module's closing: of the one in progress, of the next
// one, or of the one that has ended.
func (m *Module) Released() Completion {
	return m.closer.Completion()
}

// unloading owns a module that no user has.
func unloading(c *core.Context, h driver.Module) *core.Undo {
	sys := c.System()
	u := sys.NewUndo(c.Device)
	u.Own("module", 0, func() error {
		if r := c.TeardownUnlessGone(func() driver.Result { return sys.Drv.ModuleUnload(c.Handle, h) }); r != driver.Success {
			return c.CallError("cuda: unload a module", driver.CallModuleUnload, r, "")
		}
		return nil
	})
	return u
}

func (m *Module) unload(op string) error {
	unload := func() driver.Result { return m.ctx.System().Drv.ModuleUnload(m.ctx.Handle, m.handle) }
	if r := m.ctx.Teardown(unload); r != driver.Success {
		return m.ctx.CallError(op, driver.CallModuleUnload, r, m.dev.String())
	}
	m.obj.Untrack()
	m.watched.Stop()
	return nil
}

// checkImage refuses images that are shorter than their headers say: the driver takes no
// length, and would read past the end.
func checkImage(op string, image []byte) error {
	if len(image) == 0 {
		return errs.Invalid(op, "an empty image", "pass PTX text, a cubin, or a fat binary")
	}
	ends, binary := imageEnd(image)
	switch {
	case binary && ends == unknownEnd:
		return errs.Invalid(op, fmt.Sprintf("a binary image of %s whose header is cut short or gives no size", errs.Count(len(image), "byte")),
			"build or read the image again")
	case binary && ends > uint64(len(image)):
		return errs.Invalid(op, fmt.Sprintf("a binary image of %s that says it has %d", errs.Count(len(image), "byte"), ends),
			"the image is cut short, or no code for a GPU: build or read it again")
	case !binary && image[0] == 0:
		return errs.Invalid(op, fmt.Sprintf("an image of %s that begins with a NUL", errs.Count(len(image), "byte")), "pass PTX text, a cubin, or a fat binary")
	}
	return nil
}

// ptxText returns PTX up to its first NUL, where every driver's text ends, so that
// bytes behind it cost nothing.
func ptxText(image []byte) []byte {
	if end := bytes.IndexByte(image, 0); end >= 0 {
		return image[:end]
	}
	return image
}

const (
	elfMagic = "\x7fELF"
	fatMagic = "\x50\xed\x55\xba"

	fatHeader = 16 // magic, version, size of the header, size of the rest
	elfHeader = 64 // of 64 bits, as every GPU binary is

	// unknownEnd is the end of an image that is too short to say.
	unknownEnd = 1<<64 - 1
)

// imageEnd is where a binary image ends by its own header: the last of an ELF
// file's two tables, or the fat binary's length.
func imageEnd(image []byte) (end uint64, isBinary bool) {
	le := binary.LittleEndian
	switch {
	case strings.HasPrefix(string(image[:min(4, len(image))]), fatMagic):
		if len(image) < fatHeader {
			return unknownEnd, true
		}
		return sum(uint64(le.Uint16(image[6:])), le.Uint64(image[8:])), true
	case strings.HasPrefix(string(image[:min(4, len(image))]), elfMagic):
		if len(image) < elfHeader {
			return unknownEnd, true
		}
		table := func(at, size, count int) uint64 {
			return sum(le.Uint64(image[at:]), uint64(le.Uint16(image[size:]))*uint64(le.Uint16(image[count:])))
		}
		return max(table(32, 54, 56), table(40, 58, 60)), true
	}
	return 0, false
}

// sum stays at the largest number instead of beginning anew.
func sum(a, b uint64) uint64 {
	if a+b < a {
		return unknownEnd
	}
	return a + b
}

var (
	ptxVersion = regexp.MustCompile(`\.version\s+\d+\.\d+`)
	ptxTarget  = regexp.MustCompile(`\.target\s+\w+`)
)

// describeImage says for people what an image is: "900 bytes of PTX (.version
// 7.5 .target sm_70)". PTX declares both before any code, so the rest, which may
// be very long, is not searched.
func describeImage(image []byte) string {
	const declarations = 64 << 10
	size, kind := len(image), "PTX"
	head := image[:min(size, declarations)]
	if _, isBinary := imageEnd(image); isBinary {
		kind = "binary code"
	} else if v, t := ptxVersion.Find(head), ptxTarget.Find(head); v != nil && t != nil {
		kind = fmt.Sprintf("PTX (%s %s)", v, t)
	}
	return fmt.Sprintf("%d bytes of %s", size, kind)
}
