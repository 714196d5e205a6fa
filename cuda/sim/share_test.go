//go:build linux

package sim

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/cuvmm/cuvmm/internal/osmem"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
)

func fdHandle(fd int) (s driver.ShareableHandle) {
	binary.NativeEndian.PutUint32(s[:], uint32(int32(fd)))
	return s
}

// export makes a file of a handle's descriptor.
func (r *rig) export(h driver.MemHandle) *os.File {
	r.t.Helper()
	s, res := r.MemExportToShareableHandle(h, driver.HandlePosixFD)
	r.ok(res)
	f := os.NewFile(uintptr(binary.NativeEndian.Uint32(s[:])), "exported memory")
	r.t.Cleanup(func() { f.Close() })
	return f
}

func (r *rig) importFD(f *os.File) (driver.MemHandle, driver.Result) {
	return r.MemImportFromShareableHandle(fdHandle(int(f.Fd())), driver.HandlePosixFD)
}

// mapHandle maps a handle for device 0 for the length of the test.
func (r *rig) mapHandle(h driver.MemHandle) driver.Ptr {
	r.t.Helper()
	p := r.reserve(chunk)
	r.ok(r.MemMap(p, chunk, 0, h))
	r.allow(p, chunk, 0)
	r.t.Cleanup(func() {
		r.ok(r.MemUnmap(p, chunk))
		r.ok(r.MemAddressFree(p, chunk))
	})
	return p
}

func needLinux(t *testing.T) {
	if !osmem.Linux {
		t.Skip("memory files need Linux on amd64 or arm64")
	}
}

func TestExportKeepsContentsAndImportSeesThem(t *testing.T) {
	needLinux(t)
	r := start(t, Options{})
	h := r.create(chunk, on(0, driver.HandlePosixFD))
	p := r.mapHandle(h)
	want := pattern(chunk)
	clear(want[4096:8192]) // a page that was never written stays so
	require.NoError(t, r.m.Poke(cuda.Ptr(p), want))
	before := r.free()
	f := r.export(h)
	require.Equal(t, want, r.bytes(p, chunk))
	require.Equal(t, before, r.free())
	flags, _, errno := syscall.Syscall(syscall.SYS_FCNTL, f.Fd(), syscall.F_GETFD, 0)
	require.Zero(t, errno)
	require.Equal(t, uintptr(syscall.FD_CLOEXEC), flags)
	require.Error(t, f.Truncate(2*chunk), "it is sealed")

	other := start(t, Options{}) // as another process
	for _, in := range []*rig{r, other} {
		a, res := in.importFD(f)
		in.ok(res)
		b, res := in.importFD(f)
		in.ok(res)
		require.NotEqual(t, a, b)
		prop, res := in.MemGetAllocationPropertiesFromHandle(a)
		in.ok(res)
		require.Equal(t, on(0, 0), prop)
		_, res = in.MemExportToShareableHandle(a, driver.HandlePosixFD)
		in.is(driver.InvalidValue, res)
		q := in.mapHandle(a)
		require.Equal(t, want, in.bytes(q, chunk))
		in.ok(in.MemsetD8Async(in.ctx, q, 0xee, 8, driver.StreamNull))
		in.ok(in.StreamSynchronize(in.ctx, driver.StreamNull))
		copy(want, repeated(0xee, 8))
		require.Equal(t, want[:16], r.bytes(p, 16))
		space := in.reserve(2 * chunk)
		in.is(driver.NotSupported, in.MemMap(space, 2*chunk, 0, b))
		in.ok(in.MemAddressFree(space, 2*chunk))
		in.ok(in.MemRelease(a))
		in.ok(in.MemRelease(b))
	}
	require.Equal(t, before, r.free(), "importing takes no memory")
	r.ok(r.MemRelease(h))
}

func TestPinnedMemoryComesBackWhenItIsNeeded(t *testing.T) {
	needLinux(t)
	r := start(t, Options{Devices: []DeviceOptions{{Memory: chunk}}})
	h := r.create(chunk, on(0, driver.HandlePosixFD))
	f := r.export(h)
	r.ok(r.MemRelease(h))
	_, res := r.MemCreate(chunk, on(0, 0))
	r.is(driver.OutOfMemory, res)
	require.NoError(t, f.Close())
	r.ok(r.MemRelease(r.create(chunk, on(0, 0))))
}

func TestWhatIsNotExportedMemoryIsRefused(t *testing.T) {
	needLinux(t)
	r := start(t, Options{})
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer null.Close()
	_, res := r.importFD(null)
	r.is(driver.Unknown, res)
	for _, fd := range []int{-1, 1 << 20} {
		_, res = r.MemImportFromShareableHandle(fdHandle(fd), driver.HandlePosixFD)
		r.is(driver.Unknown, res)
	}
	// A sealed file of another program, without a label.
	file, err := osmem.NewShared("other", 2*chunk)
	require.NoError(t, err)
	fd, err := file.Export()
	require.NoError(t, err)
	_, res = r.MemImportFromShareableHandle(fdHandle(fd), driver.HandlePosixFD)
	r.is(driver.Unknown, res)
	require.NoError(t, syscall.Close(fd))
	require.NoError(t, file.Close())
	_, res = r.MemImportFromShareableHandle(fdHandle(fd), driver.HandleFabric)
	r.is(driver.NotSupported, res)
	_, res = r.MemImportFromShareableHandle(fdHandle(fd), 3)
	r.is(driver.InvalidValue, res)

	plain, shareable := r.create(chunk, on(0, 0)), r.create(chunk, on(0, driver.HandlePosixFD))
	for _, bad := range []struct {
		h driver.MemHandle
		t driver.HandleTypes
	}{{plain, driver.HandlePosixFD}, {shareable, 0}, {shareable, driver.HandleFabric}, {shareable, 3}, {77, driver.HandlePosixFD}} {
		_, res = r.MemExportToShareableHandle(bad.h, bad.t)
		r.is(driver.InvalidValue, res)
	}
	r.ok(r.MemRelease(plain))
	r.ok(r.MemRelease(shareable))
}

func TestMemoryOfAnAbsentDeviceCannotBeImported(t *testing.T) {
	needLinux(t)
	r := start(t, Options{Devices: []DeviceOptions{{}, {}}})
	h := r.create(chunk, on(1, driver.HandlePosixFD))
	f := r.export(h)
	small := start(t, Options{})
	_, res := small.importFD(f)
	small.is(driver.NotSupported, res)
	r.ok(r.MemRelease(h))
}

// A full table of descriptors is not what is wrong with the memory.
func TestExportAndImportWithoutAFreeDescriptor(t *testing.T) {
	needLinux(t)
	for _, o := range []Options{{}, {Folder: t.TempDir()}} {
		r := start(t, o)
		h := r.create(chunk, on(0, driver.HandlePosixFD))
		f := r.export(h)
		maker, importer := start(t, o), start(t, o)
		other := maker.create(chunk, on(0, driver.HandlePosixFD))
		fillDescriptors(t, func() {
			_, res := importer.importFD(f)
			r.is(driver.OperatingSystem, res)
			_, res = maker.MemExportToShareableHandle(other, driver.HandlePosixFD)
			r.is(driver.OperatingSystem, res)
		})
		i, res := importer.importFD(f)
		r.ok(res)
		r.ok(importer.MemRelease(i))
		require.NoError(t, maker.export(other).Close())
		r.ok(maker.MemRelease(other))
		r.ok(r.MemRelease(h))
	}
}

// fillDescriptors calls f while the process can open no further descriptor.
func fillDescriptors(t *testing.T, f func()) {
	t.Helper()
	var limit syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	low := limit
	low.Cur = 200
	require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &low))
	defer func() { require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit)) }()
	var full []int
	defer func() {
		for _, fd := range full {
			_ = syscall.Close(fd)
		}
	}()
	for {
		fd, err := syscall.Dup(0)
		if err != nil {
			require.ErrorIs(t, err, syscall.EMFILE)
			break
		}
		full = append(full, fd)
	}
	f()
}

func TestExportWhileWorkIsUnderway(t *testing.T) {
	needLinux(t)
	// The bytes move into a file while copies write them: none is lost.
	r := start(t, Options{})
	s := r.stream(1)
	for range 20 {
		h := r.create(chunk, on(0, driver.HandlePosixFD))
		p := r.mapHandle(h)
		for i := range driver.Ptr(64) {
			r.ok(r.MemsetD8Async(r.ctx, p+i*chunk/64, byte(i+1), chunk/64, s))
		}
		r.StreamQuery(r.ctx, s) // sets it going
		r.export(h).Close()
		r.ok(r.StreamSynchronize(r.ctx, s))
		got := r.bytes(p, chunk)
		for i := range 64 {
			require.Equal(t, byte(i+1), got[(i+1)*chunk/64-1])
		}
		r.ok(r.MemRelease(h))
	}
}

func TestOnlyExportedMemoryCostsDescriptors(t *testing.T) {
	needLinux(t)
	r := start(t, Options{})
	open := func() int {
		files, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(files)
	}
	before := open()
	var all []driver.MemHandle
	for range 100 {
		all = append(all, r.create(chunk, on(0, driver.HandlePosixFD)))
	}
	require.Equal(t, before, open())
	f := r.export(all[0])
	require.Equal(t, before+2, open())
	require.NoError(t, f.Close())
	for _, h := range all {
		r.ok(r.MemRelease(h))
	}
	require.Equal(t, before, open())
}

func TestDMABufPinsWhatItIsOf(t *testing.T) {
	needLinux(t)
	r := start(t, Options{})
	before := r.free()
	p := r.reserve(2 * chunk)
	for i := range driver.Ptr(2) {
		h := r.create(chunk, on(0, 0))
		r.ok(r.MemMap(p+i*chunk, chunk, 0, h))
		r.ok(r.MemRelease(h))
	}
	fd, res := r.MemGetHandleForAddressRange(r.ctx, p+4096, 2*chunk-8192, 0)
	r.ok(res)
	_, res = r.MemImportFromShareableHandle(fdHandle(int(fd)), driver.HandlePosixFD)
	r.is(driver.Unknown, res)
	for _, bad := range []struct {
		p driver.Ptr
		n uint64
	}{{p + 1, 4096}, {p, 100}, {p, 0}, {p, 3 * chunk}} {
		_, res = r.MemGetHandleForAddressRange(r.ctx, bad.p, bad.n, 0)
		r.is(driver.InvalidValue, res)
	}
	r.ok(r.MemUnmap(p, 2*chunk))
	require.Equal(t, before-2*chunk, r.free())
	require.NoError(t, syscall.Close(int(fd)))
	require.Equal(t, before, r.free())
	r.ok(r.MemAddressFree(p, 2*chunk))
}

func FuzzLabel(f *testing.F) {
	good := label{Magic: labelMagic, Size: chunk, Kind: labelMemory, Location: uint32(driver.LocationDevice)}
	var b bytes.Buffer
	require.NoError(f, binary.Write(&b, binary.LittleEndian, &good))
	f.Add(b.Bytes(), uint64(chunk)+host.PageSize())
	f.Add([]byte{}, uint64(0))
	f.Fuzz(func(t *testing.T, b []byte, size uint64) {
		if l, err := readLabel(b, size); err == nil {
			require.Less(t, l.Size, size)
			require.Equal(t, size, l.Size+host.PageSize())
			require.Contains(t, []uint32{labelMemory, labelDMABuf, labelTeam}, l.Kind)
		}
	})
}

// opened is a machine in a child process.
func opened() (*Machine, driver.Driver, error) {
	m, err := New(Options{})
	if err != nil {
		return nil, nil, err
	}
	d := driver.Of(m)
	if r := d.Init(); r != driver.Success {
		return nil, nil, fmt.Errorf("init: %v", r)
	}
	return m, d, nil
}

func socketpair(t *testing.T) (a, b *os.File) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	a, b = os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

func init() {
	reexec.Register("sim: host memory without a mapping left", func(c *reexec.Child) error {
		m, err := New(Options{})
		if err != nil {
			return err
		}
		d := driver.Of(m)
		d.Init()
		h, r := d.MemCreate(chunk, at(driver.LocationHostNUMA, 0, 0))
		if r != driver.Success {
			return fmt.Errorf("create: %v", r)
		}
		ctx, r := d.DevicePrimaryCtxRetain(0)
		if r != driver.Success {
			return fmt.Errorf("context: %v", r)
		}
		one, r := d.MemAllocManaged(ctx, chunk, driver.AttachGlobal) // what the first of all needs
		if r != driver.Success {
			return fmt.Errorf("managed memory: %v", r)
		}
		if r := d.MemFree(ctx, one); r != driver.Success {
			return fmt.Errorf("managed memory: %v", r)
		}
		var p driver.Ptr
		access := func(f driver.AccessFlags) driver.Result {
			return d.MemSetAccess(p, chunk, []driver.AccessDesc{grant(driver.LocationHostNUMA, 0, f)})
		}
		hog, err := newMappingHog()
		if err != nil {
			return err
		}
		without, err := hog.exhausted(
			func() (r driver.Result) {
				// Elsewhere each time: where the CPU had access before it needs no new mapping.
				if p, r = d.MemAddressReserve(chunk, 0, 0); r != driver.Success {
					return r
				}
				if r := d.MemMap(p, chunk, 0, h); r != driver.Success {
					return r
				}
				return access(driver.AccessReadWrite)
			},
			func() driver.Result { return access(driver.AccessNone) })
		if err != nil {
			return err
		}
		flags, _ := d.MemGetAccess(driver.Location{Type: driver.LocationHostNUMA}, p)
		managed, err := hog.exhausted(
			func() (r driver.Result) { one, r = d.MemAllocManaged(ctx, chunk, driver.AttachGlobal); return r },
			func() driver.Result { return d.MemFree(ctx, one) })
		if err != nil {
			return err
		}
		if err := hog.close(); err != nil {
			return err
		}
		if without != driver.OperatingSystem || flags != driver.AccessNone {
			return fmt.Errorf("set access: %v, which reads %d: %q", without, flags, m.Log())
		}
		if managed != driver.OutOfMemory || m.Live()[KindManagedMemory] != 0 {
			return fmt.Errorf("managed memory: %v", managed)
		}
		if r := access(driver.AccessReadWrite); r != driver.Success {
			return fmt.Errorf("set access: %v", r)
		}
		*(*byte)(hostPointer(p)) = 1
		return nil
	})
}

// The process has no more mappings than the system allows: memory that the CPU
// does not reach is not said to be granted to it.
func TestAccessThatTheSystemRefuses(t *testing.T) {
	needLinux(t)
	text, err := os.ReadFile("/proc/sys/vm/max_map_count")
	require.NoError(t, err)
	if limit, err := strconv.Atoi(strings.TrimSpace(string(text))); err != nil || limit > 1<<17 {
		t.Skipf("the limit of mappings is %s", text)
	}
	c := reexec.Command(t, "sim: host memory without a mapping left")
	c.Start()
	c.Wait()
}

func TestAccessOfTheCPUWhereNoAddressIsTheProcesss(t *testing.T) {
	needLinux(t)
	r := start(t, Options{})
	const large = 2 * windowSize
	p, h := r.reserve(large), r.create(chunk, at(driver.LocationHost, 0, 0))
	r.ok(r.MemMap(p, chunk, 0, h))
	r.allow(p, chunk, 0)
	r.is(driver.OperatingSystem, r.MemSetAccess(p, chunk, []driver.AccessDesc{grant(driver.LocationHost, 0, driver.AccessRead)}))
	require.Contains(t, r.m.Log()[0], "reserve fewer than 17592186044416 bytes")
	r.ok(r.MemsetD8Async(r.ctx, p, 1, 8, driver.StreamNull))
	r.ok(r.StreamSynchronize(r.ctx, driver.StreamNull))
	r.ok(r.MemUnmap(p, chunk))
	r.ok(r.MemAddressFree(p, large))
	r.ok(r.MemRelease(h))
}
