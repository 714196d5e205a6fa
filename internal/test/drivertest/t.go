package drivertest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"testing"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// T is one run of a case: the test, the suite and the first device, and what
// the case owns. What it has not given back at its end is undone in reverse
// order; then the devices' free memory must be what it was.
type T struct {
	*testing.T
	*suite
	device

	owned  []owned
	loaded map[driver.Context]kernels
}

// owned is something that the driver or the system gave to a case.
type owned struct {
	kind string
	id   uint64
	undo func() driver.Result
}

// slack is how much the real driver may keep of a device's memory for itself
// after a case: it grows its own pools and gives back late.
const slack = 128 << 20

func newT(t *testing.T, s *suite, section string) *T {
	t.Helper()
	u := &T{T: t, suite: s, device: s.devices[0], loaded: map[driver.Context]kernels{}}
	var before []uint64
	for _, d := range s.devices {
		before = append(before, u.free(d))
	}
	files := openFiles()
	t.Cleanup(func() {
		for i := len(u.owned) - 1; i >= 0; i-- {
			o := u.owned[i]
			if r := o.undo(); r != driver.Success {
				t.Errorf("clean-up: %s %#x: %v", o.kind, o.id, r)
			}
		}
		for i, d := range s.devices {
			switch after := u.free(d); {
			case s.software && after != before[i]:
				t.Errorf("device %d: %d bytes are free, %d were before the case", i, after, before[i])
			case after+slack < before[i]:
				t.Errorf("device %d: %d bytes are free, %d were before the case", i, after, before[i])
			}
		}
		// Both drivers open files of their own at the first use of a feature, so
		// only the section about descriptors counts them. The software driver noticed
		// closed ones above, when it counted the free memory.
		if s.software && section == "4" && openFiles() != files {
			t.Errorf("%d files are open, %d were before the case", openFiles(), files)
		}
	})
	return u
}

// openFiles returns how many files the process has open, or -1 if the system does not
// list them.
func openFiles() int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return -1
	}
	return len(entries)
}

// returns fails the case unless the driver returned what was wanted.
func (t *T) returns(want, got driver.Result, what string, args ...any) {
	t.Helper()
	if want != got {
		t.Fatalf("%s: the driver returns %v, want %v", fmt.Sprintf(what, args...), got, want)
	}
}

// ok fails the case where the driver did not succeed.
func (t *T) ok(got driver.Result, what string, args ...any) {
	t.Helper()
	t.returns(driver.Success, got, what, args...)
}

func (t *T) own(kind string, id uint64, undo func() driver.Result) {
	t.owned = append(t.owned, owned{kind, id, undo})
}

// end gives one thing back now, and requires success.
func (t *T) end(kind string, id uint64) {
	t.Helper()
	t.ok(t.disown(kind, id).undo(), "end of %s %#x", kind, id)
}

// disown returns one thing that the case gives back by itself.
func (t *T) disown(kind string, id uint64) (o owned) {
	t.Helper()
	for i := len(t.owned) - 1; i >= 0; i-- {
		if o := t.owned[i]; o.kind == kind && o.id == id {
			t.owned = append(t.owned[:i], t.owned[i+1:]...)
			return o
		}
	}
	t.Fatalf("%s %#x is not the case's own", kind, id)
	return o
}

// onDevice, onHost and onNode are the properties of memory that lives there.
func onDevice(d driver.Device) driver.AllocationProp {
	return driver.AllocationProp{
		Type:     driver.AllocationPinned,
		Location: deviceLocation(d),
	}
}

func onHost() driver.AllocationProp {
	return driver.AllocationProp{
		Type:     driver.AllocationPinned,
		Location: driver.Location{Type: driver.LocationHost},
	}
}

func onNode(id int32) driver.AllocationProp {
	return driver.AllocationProp{
		Type:     driver.AllocationPinned,
		Location: driver.Location{Type: driver.LocationHostNUMA, ID: id},
	}
}

// shared is the same memory, exportable in the forms that are named.
func shared(p driver.AllocationProp, types driver.HandleTypes) driver.AllocationProp {
	p.RequestedHandleTypes = types
	return p
}

func deviceLocation(d driver.Device) driver.Location {
	return driver.Location{Type: driver.LocationDevice, ID: int32(d)}
}

func grant(flags driver.AccessFlags, to ...driver.Location) []driver.AccessDesc {
	var descs []driver.AccessDesc
	for _, l := range to {
		descs = append(descs, driver.AccessDesc{Location: l, Flags: flags})
	}
	return descs
}

// granularity is the unit of memory with such properties, in bytes.
func (t *T) granularity(p driver.AllocationProp) uint64 {
	t.Helper()
	n, r := t.D.MemGetAllocationGranularity(p, driver.GranularityMinimum)
	t.ok(r, "granularity of %+v", p)
	return n
}

// create makes memory of size bytes, on the case's device unless prop says otherwise.
func (t *T) create(size uint64, prop ...driver.AllocationProp) driver.MemHandle {
	t.Helper()
	p := onDevice(t.Device)
	if len(prop) > 0 {
		p = prop[0]
	}
	h, r := t.D.MemCreate(size, p)
	t.ok(r, "create %d bytes of %+v", size, p)
	t.ownHandle(h)
	return h
}

// ownHandle notes one reference to a handle.
func (t *T) ownHandle(h driver.MemHandle) {
	t.own("handle", uint64(h), func() driver.Result { return t.D.MemRelease(h) })
}

func (t *T) release(h driver.MemHandle) {
	t.Helper()
	t.end("handle", uint64(h))
}

// reserve takes an address range of size bytes, aligned to align or for memory of the
// case's device.
func (t *T) reserve(size uint64, align ...uint64) driver.Ptr {
	t.Helper()
	var to uint64
	if len(align) > 0 {
		to = align[0]
	}
	p, r := t.D.MemAddressReserve(size, to, 0)
	t.ok(r, "reserve %d bytes", size)
	t.ownAddress(p, size)
	return p
}

func (t *T) ownAddress(p driver.Ptr, size uint64) {
	t.own("reservation", uint64(p), func() driver.Result { return t.D.MemAddressFree(p, size) })
}

// bind maps the whole of a handle.
func (t *T) bind(p driver.Ptr, size uint64, h driver.MemHandle) {
	t.Helper()
	t.ok(t.D.MemMap(p, size, 0, h), "map %d bytes", size)
	t.own("mapping", uint64(p), func() driver.Result { return t.D.MemUnmap(p, size) })
}

func (t *T) unmap(p driver.Ptr) {
	t.Helper()
	t.end("mapping", uint64(p))
}

// allow grants the case's device reads and writes.
func (t *T) allow(p driver.Ptr, size uint64) {
	t.Helper()
	t.ok(t.D.MemSetAccess(p, size, grant(driver.AccessReadWrite, deviceLocation(t.Device))), "set access of %d bytes", size)
}

// memory is a new allocation of the given bytes, mapped at an address of its
// own and open to the case's device. The handle is the case's.
func (t *T) memory(size uint64, prop ...driver.AllocationProp) (driver.Ptr, driver.MemHandle) {
	t.Helper()
	h := t.create(size, prop...)
	p := t.reserve(size)
	t.bind(p, size, h)
	t.allow(p, size)
	return p, h
}

// free is how much of a device's memory is free, in bytes.
func (t *T) free(d device) uint64 {
	t.Helper()
	n, _, r := t.D.MemGetInfo(d.ctx)
	t.ok(r, "mem-get-info")
	return n
}

// fill writes v to n bytes from a device, and waits.
func (t *T) fill(d device, p driver.Ptr, n uint64, v byte) {
	t.Helper()
	t.ok(t.D.MemsetD8Async(d.ctx, p, v, n, d.stream), "memset of %d bytes", n)
	t.ok(t.D.StreamSynchronize(d.ctx, d.stream), "memset of %d bytes", n)
}

// reads requires that n bytes all read v from a device.
func (t *T) reads(d device, p driver.Ptr, n uint64, v byte) {
	t.Helper()
	page := unsafe.Slice((*byte)(t.page), pageSize)
	want := bytes.Repeat([]byte{v}, pageSize)
	for at := uint64(0); at < n; at += pageSize {
		part := min(pageSize, n-at)
		t.ok(t.D.MemcpyDtoHAsync(d.ctx, t.page, p+driver.Ptr(at), part, d.stream), "copy to the host")
		t.ok(t.D.StreamSynchronize(d.ctx, d.stream), "copy to the host")
		if bytes.Equal(page[:part], want[:part]) { // all at once: the race detector makes a loop slow
			continue
		}
		i := slices.IndexFunc(page[:part], func(b byte) bool { return b != v })
		t.Fatalf("byte %d of %d reads %#x, want %#x", at+uint64(i), n, page[i], v)
	}
}

// works requires that a device reads back what it writes to both ends of a
// range.
func (t *T) works(d device, p driver.Ptr, n uint64) {
	t.Helper()
	const end = 4096
	t.fill(d, p, end, 0x5a)
	t.fill(d, p+driver.Ptr(n-end), end, 0xa5)
	t.reads(d, p, end, 0x5a)
	t.reads(d, p+driver.Ptr(n-end), end, 0xa5)
}

// export makes a descriptor of a handle.
func (t *T) export(h driver.MemHandle) int {
	t.Helper()
	s, r := t.D.MemExportToShareableHandle(h, driver.HandlePosixFD)
	t.ok(r, "export")
	fd := toFD(s)
	t.ownDescriptor(fd)
	return fd
}

func (t *T) ownDescriptor(fd int) {
	t.own("descriptor", uint64(fd), func() driver.Result {
		if err := closeDescriptor(fd); err != nil {
			t.Errorf("close of descriptor %d: %v", fd, err)
		}
		return driver.Success
	})
}

func (t *T) close(fd int) {
	t.Helper()
	t.end("descriptor", uint64(fd))
}

// fromFD is a descriptor in the form that the driver imports.
func fromFD(fd int) (s driver.ShareableHandle) {
	binary.NativeEndian.PutUint32(s[:], uint32(int32(fd)))
	return s
}

func toFD(s driver.ShareableHandle) int { return int(int32(binary.NativeEndian.Uint32(s[:]))) }

// descriptorPath is a link to what a descriptor of this process names.
func descriptorPath(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }

// importFD makes a handle of a descriptor.
func (t *T) importFD(fd int) driver.MemHandle {
	t.Helper()
	h, r := t.D.MemImportFromShareableHandle(fromFD(fd), driver.HandlePosixFD)
	t.ok(r, "import")
	t.ownHandle(h)
	return h
}

// newStream makes a stream in a context.
func (t *T) newStream(c driver.Context, flags driver.StreamFlags) driver.Stream {
	t.Helper()
	s, r := t.D.StreamCreate(c, flags)
	t.ok(r, "create a stream")
	t.own("stream", uint64(s), func() driver.Result { return t.D.StreamDestroy(c, s) })
	return s
}

func (t *T) newEvent(c driver.Context) driver.Event {
	t.Helper()
	e, r := t.D.EventCreate(c, driver.EventDisableTiming)
	t.ok(r, "create an event")
	t.own("event", uint64(e), func() driver.Result { return t.D.EventDestroy(c, e) })
	return e
}

// newContext makes a second context on the case's device.
func (t *T) newContext() driver.Context {
	t.Helper()
	c, r := t.F.CtxCreate(0, t.Device)
	t.ok(r, "create a context")
	t.own("context", uint64(c), func() driver.Result { return t.F.CtxDestroy(c) })
	return c
}

// hostPointer is an address at which the CPU reaches memory that the Go
// collector does not own.
func hostPointer(p driver.Ptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&p)) }
