//go:build linux && (amd64 || arm64)

package sim

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// small is a machine in a folder with one device of so many chunks.
func small(folder string, chunks int) Options {
	return Options{Folder: folder, Devices: []DeviceOptions{{Memory: chunks * chunk}}}
}

// taken is what a third process sees to be taken of device 0.
func taken(t testing.TB, folder string) int {
	t.Helper()
	u, err := Inspect(folder)
	require.NoError(t, err)
	return u.Devices[0].Taken
}

// noFiles says that the machine's folder holds nothing but the machine.
func noFiles(t testing.TB, folder string) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	require.NoError(t, err)
	require.Len(t, entries, 1)
}

func openDescriptors(t testing.TB) int {
	files, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(files)
}

func exported(s driver.ShareableHandle) int { return int(binary.NativeEndian.Uint32(s[:])) }

func TestMemoryLimitsAreSharedInAFolder(t *testing.T) {
	folder := t.TempDir()
	o := small(folder, 8)
	o.HostMemory = 4 * chunk
	o.Devices[0].ContextMemory = chunk
	a, b := start(t, o), start(t, o) // a context each
	require.Equal(t, 6*chunk, a.free())
	h := a.create(5*chunk, on(0, 0))
	require.Equal(t, chunk, b.free())
	_, res := b.MemCreate(2*chunk, on(0, 0))
	b.is(driver.OutOfMemory, res)
	_, res = b.MemAlloc(b.ctx, 2*chunk)
	b.is(driver.OutOfMemory, res)
	b.ok(b.MemRelease(b.create(chunk, on(0, 0))))
	a.ok(a.MemRelease(h))
	free, total, res := b.MemGetInfo(b.ctx)
	b.ok(res)
	require.EqualValues(t, 6*chunk, free)
	require.EqualValues(t, 8*chunk, total)

	a.pinned(3 * chunk)
	_, res = b.MemHostAlloc(b.ctx, 2*chunk, 0)
	b.is(driver.OutOfMemory, res)
	_, res = b.MemCreate(2*chunk, at(driver.LocationHostNUMA, 0, 0))
	b.is(driver.OutOfMemory, res)
}

func TestExportedMemoryIsCountedOnceInAFolder(t *testing.T) {
	folder := t.TempDir()
	a, b := start(t, small(folder, 8)), start(t, small(folder, 8))
	files := openDescriptors(t)
	h := a.create(2*chunk, on(0, driver.HandlePosixFD))
	p := a.reserve(2 * chunk)
	a.ok(a.MemMap(p, 2*chunk, 0, h))
	a.allow(p, 2*chunk, 0)
	require.NoError(t, a.m.Poke(cuda.Ptr(p), pattern(2*chunk)))
	f := a.export(h)
	require.Equal(t, 6*chunk, b.free())
	first, res := b.importFD(f)
	b.ok(res)
	second, res := b.importFD(f)
	b.ok(res)
	again, res := a.importFD(f) // what it made itself
	a.ok(res)
	require.NoError(t, f.Close())
	require.Equal(t, files, openDescriptors(t), "neither end keeps a descriptor")
	require.Equal(t, 6*chunk, a.free())
	u, err := Inspect(folder)
	require.NoError(t, err)
	self := os.Getpid()
	require.Equal(t, []ExportedMemory{{Device: 0, Size: 2 * chunk, Maker: self, Holders: []int{self, self}}}, u.Exported)
	require.Equal(t, []ProcessUsage{
		{PID: self, Own: []int{0}, Exports: 1}, {PID: self, Own: []int{0}, Imports: 1},
	}, u.Processes)
	require.Contains(t, u.String(), fmt.Sprintf("%d bytes on device 0, made by process %d", 2*chunk, self))

	prop, res := b.MemGetAllocationPropertiesFromHandle(first)
	b.ok(res)
	require.Equal(t, on(0, 0), prop)
	q := b.reserve(2 * chunk)
	b.ok(b.MemMap(q, 2*chunk, 0, first))
	b.ok(b.MemRelease(first))
	b.ok(b.MemRelease(second))
	a.ok(a.MemRelease(again))
	a.ok(a.MemUnmap(p, 2*chunk))
	a.ok(a.MemAddressFree(p, 2*chunk))
	a.ok(a.MemRelease(h))
	require.Equal(t, 2*chunk, taken(t, folder), "the importer's mapping holds it")
	require.Equal(t, pattern(2*chunk), b.bytes(q, 2*chunk))
	b.ok(b.MemUnmap(q, 2*chunk))
	b.ok(b.MemAddressFree(q, 2*chunk))
	require.Zero(t, taken(t, folder))
	noFiles(t, folder)
}

func TestHostMemoryIsSharedInAFolder(t *testing.T) {
	folder := t.TempDir()
	a, b := start(t, small(folder, 8)), start(t, small(folder, 8))
	h := a.create(chunk, at(driver.LocationHostNUMA, 0, driver.HandlePosixFD))
	i, res := b.importFD(a.export(h))
	b.ok(res)
	var views [2][]byte
	for n, r := range []*rig{a, b} {
		p := r.reserve(chunk)
		r.ok(r.MemMap(p, chunk, 0, []driver.MemHandle{h, i}[n]))
		r.ok(r.MemSetAccess(p, chunk, []driver.AccessDesc{grant(driver.LocationHostNUMA, 0, driver.AccessReadWrite)}))
		views[n] = unsafe.Slice((*byte)(hostPointer(p)), chunk)
		defer func() {
			r.ok(r.MemUnmap(p, chunk))
			r.ok(r.MemAddressFree(p, chunk))
		}()
	}
	views[0][chunk-1] = 77
	require.EqualValues(t, 77, views[1][chunk-1])
	u, err := Inspect(folder)
	require.NoError(t, err)
	require.Equal(t, chunk, u.HostTaken)
	require.Equal(t, -1, u.Exported[0].Device)
	require.Contains(t, u.String(), "on the host")
	a.ok(a.MemRelease(h))
	b.ok(b.MemRelease(i))
}

func TestTheFirstProcessFixesTheMachine(t *testing.T) {
	folder := t.TempDir()
	two := Options{Folder: folder, Devices: []DeviceOptions{
		{Memory: 8 * chunk, Attributes: map[int]int{132: 1}}, {Memory: 4 * chunk, Unreachable: []int{0}},
	}}
	start(t, two)
	for what, change := range map[string]func(o *Options){
		"it has 2 devices, these options say 1":                                                                      func(o *Options) { o.Devices = o.Devices[:1] },
		"it has HostMemory 68719476736, these options say 65536":                                                     func(o *Options) { o.HostMemory = 65536 },
		"its device 0 has Memory 16777216, these options say 65536":                                                  func(o *Options) { o.Devices[0].Memory = 65536 },
		"its device 1 has UUID 6375766d6d2d73696d2d677075303031, these options say 01000000000000000000000000000000": func(o *Options) { o.Devices[1].UUID = [16]byte{1} },
		"its device 1 has Granularity 2097152, these options say 65536":                                              func(o *Options) { o.Devices[1].Granularity = 1 << 16 },
		"its device 0 has Attributes map[132:1], these options say map[132:0]":                                       func(o *Options) { o.Devices[0].Attributes = map[int]int{132: 0} },
		"its device 1 has Unreachable [0], these options say []":                                                     func(o *Options) { o.Devices[1].Unreachable = nil },
	} {
		other := two
		other.Devices = append([]DeviceOptions(nil), two.Devices...)
		change(&other)
		_, err := New(other)
		require.ErrorContains(t, err, what)
		require.ErrorContains(t, err, folder)
		require.ErrorContains(t, err, "take another folder")
	}
	other := two
	other.Seed, other.Poison, other.DriverVersion = 7, true, 12040 // its own affair
	start(t, other)
}

func TestHiddenDevicesAreCountedToo(t *testing.T) {
	folder := t.TempDir()
	two := Options{Folder: folder, Devices: []DeviceOptions{{Memory: 8 * chunk}, {Memory: 4 * chunk}}}
	second := two
	second.Visible = []int{1}
	a, b := start(t, two), start(t, second)
	f := a.export(a.create(chunk, on(1, driver.HandlePosixFD)))
	require.Equal(t, 3*chunk, b.free(), "its device 0 is the machine's device 1")
	h, res := b.importFD(f)
	b.ok(res)
	prop, res := b.MemGetAllocationPropertiesFromHandle(h)
	b.ok(res)
	require.EqualValues(t, 0, prop.Location.ID)
	b.ok(b.MemRelease(h))
	hidden := a.create(chunk, on(0, driver.HandlePosixFD))
	g := a.export(hidden)
	_, res = b.importFD(g)
	b.is(driver.NotSupported, res)
	require.NoError(t, g.Close())
	for h := range a.m.handles {
		a.ok(a.MemRelease(h))
	}
	u, err := Inspect(folder)
	require.NoError(t, err)
	require.Zero(t, u.Devices[0].Taken)
}

func TestOnlyMemoryOfTheSameFolderIsImported(t *testing.T) {
	a, b, alone := start(t, small(t.TempDir(), 8)), start(t, small(t.TempDir(), 8)), start(t, Options{})
	for _, from := range []*rig{a, b, alone} {
		h := from.create(chunk, on(0, driver.HandlePosixFD))
		f := from.export(h)
		for _, to := range []*rig{a, b, alone} {
			if to == from {
				continue
			}
			_, res := to.importFD(f)
			to.is(driver.Unknown, res)
		}
		from.ok(from.MemRelease(h))
		f.Close()
	}
	// A file that says it is the machine's memory.
	h := a.create(chunk, on(0, driver.HandlePosixFD))
	f := a.export(h)
	copied, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	defer copied.Close()
	_, err = copied.ReadFrom(f)
	require.NoError(t, err)
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	defer null.Close()
	for _, bad := range []*os.File{copied, null} {
		_, res := a.importFD(bad)
		a.is(driver.Unknown, res)
	}
	_, res := a.MemImportFromShareableHandle(fdHandle(-1), driver.HandlePosixFD)
	a.is(driver.Unknown, res)
	a.ok(a.MemRelease(h))
}

func TestAFolderMustBeOne(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(dir+"/file", nil, 0o600))
	_, err := New(Options{Folder: dir + "/file"})
	require.ErrorContains(t, err, "not a directory")
	_, err = Inspect(dir)
	require.ErrorIs(t, err, os.ErrNotExist)
	m, err := New(Options{Folder: dir + "/a/b"})
	require.NoError(t, err)
	require.NoError(t, m.Close())
	require.NoError(t, os.RemoveAll(dir+"/a"))
}

func TestManyImportsCostNoDescriptors(t *testing.T) {
	folder := t.TempDir()
	const many = 500
	a, b := start(t, small(folder, many)), start(t, small(folder, many))
	before := openDescriptors(t)
	var ours, theirs []driver.MemHandle
	for range many {
		h := a.create(chunk, on(0, driver.HandlePosixFD))
		f := a.export(h)
		i, res := b.importFD(f)
		b.ok(res)
		require.NoError(t, f.Close())
		ours, theirs = append(ours, h), append(theirs, i)
	}
	require.Equal(t, before, openDescriptors(t))
	_, res := a.MemCreate(chunk, on(0, 0))
	a.is(driver.OutOfMemory, res)
	for i := range ours {
		a.ok(a.MemRelease(ours[i]))
	}
	require.Equal(t, many*chunk, taken(t, folder))
	for i := range theirs {
		b.ok(b.MemRelease(theirs[i]))
	}
	require.Zero(t, taken(t, folder))
	noFiles(t, folder)
}

func TestADMABufPinsMemoryOfAMakerThatIsGone(t *testing.T) {
	folder := t.TempDir()
	m, err := New(small(folder, 8))
	require.NoError(t, err)
	d := driver.Of(m)
	require.Zero(t, d.Init())
	ctx, _ := d.DevicePrimaryCtxRetain(0)
	p, _ := d.MemAddressReserve(2*chunk, 0, 0)
	for i := range driver.Ptr(2) {
		h, r := d.MemCreate(chunk, on(0, 0))
		require.Zero(t, r)
		require.Zero(t, d.MemMap(p+i*chunk, chunk, 0, h))
		require.Zero(t, d.MemRelease(h))
	}
	require.NoError(t, m.Poke(cuda.Ptr(p), pattern(2*chunk)))
	fd, r := d.MemGetHandleForAddressRange(ctx, p+4096, 2*chunk-8192, 0)
	require.Zero(t, r)
	got, err := m.Bytes(cuda.Ptr(p), 2*chunk)
	require.NoError(t, err)
	require.Equal(t, pattern(2*chunk), got)
	require.Equal(t, 2*chunk, taken(t, folder))
	require.Zero(t, d.MemUnmap(p, 2*chunk))
	require.Equal(t, 2*chunk, taken(t, folder))
	require.Zero(t, d.MemAddressFree(p, 2*chunk))
	require.Zero(t, d.DevicePrimaryCtxRelease(0))
	require.NoError(t, m.Close())
	other := start(t, small(folder, 8))
	require.Equal(t, 6*chunk, other.free(), "it outlives its maker")
	_, res := other.MemImportFromShareableHandle(fdHandle(int(fd)), driver.HandlePosixFD)
	other.is(driver.Unknown, res)
	require.NoError(t, unix.Close(int(fd)))
	require.Equal(t, 8*chunk, other.free())
	noFiles(t, folder)
}

func TestExportFailsCleanlyWithoutTheFolder(t *testing.T) {
	folder := t.TempDir() + "/gone"
	r := start(t, small(folder, 8))
	require.NoError(t, os.RemoveAll(folder))
	h := r.create(chunk, on(0, driver.HandlePosixFD))
	p := r.mapHandle(h)
	require.NoError(t, r.m.Poke(cuda.Ptr(p), pattern(chunk)))
	before := openDescriptors(t)
	_, res := r.MemExportToShareableHandle(h, driver.HandlePosixFD)
	r.is(driver.OperatingSystem, res)
	require.Equal(t, before, openDescriptors(t))
	require.Equal(t, pattern(chunk), r.bytes(p, chunk))
	require.Equal(t, 7*chunk, r.free())
	r.ok(r.MemRelease(h))
}

// What was begun is undone when it cannot be finished.
func TestHostMemoryThatCannotBeSharedLeavesNothing(t *testing.T) {
	folder := t.TempDir()
	r := start(t, small(folder, 8))
	const times = 20
	next := r.m.books.NewID() + 1
	for i := range uint64(times) { // the names are taken
		require.NoError(t, os.WriteFile(fmt.Sprintf("%s/memory-%016x", folder, next+i), nil, 0o600))
	}
	before, maps := openDescriptors(t), kernelMappings(t)
	for range times {
		_, res := r.MemCreate(chunk, at(driver.LocationHostNUMA, 0, driver.HandlePosixFD))
		r.is(driver.OutOfMemory, res)
	}
	require.Equal(t, before, openDescriptors(t))
	require.Less(t, kernelMappings(t), maps+times)
	require.Zero(t, r.m.books.Usage().Taken[1])
}

// inFolder opens the machine of a folder in a child.
func inFolder(c *reexec.Child, options func(folder string) Options) (*Machine, driver.Driver, error) {
	m, err := New(options(c.Args[0]))
	if err != nil {
		return nil, nil, err
	}
	d := driver.Of(m)
	if r := d.Init(); r != driver.Success {
		return nil, nil, fmt.Errorf("init: %v", r)
	}
	return m, d, nil
}

const crowdChunks = 64

func init() {
	// It makes memory that holds the pattern, and sends its descriptor.
	reexec.Register("sim: exporter in a folder", func(c *reexec.Child) error {
		if len(c.Args) > 1 {
			if err := syscall.Setuid(65534); err != nil {
				return err
			}
		}
		m, d, err := inFolder(c, func(f string) Options { return small(f, crowdChunks) })
		if err != nil {
			return err
		}
		h, r := d.MemCreate(chunk, on(0, driver.HandlePosixFD))
		if r != driver.Success {
			return fmt.Errorf("create: %v", r)
		}
		p, _ := d.MemAddressReserve(chunk, 0, 0)
		d.MemMap(p, chunk, 0, h)
		if err := m.Poke(cuda.Ptr(p), pattern(chunk)); err != nil {
			return err
		}
		s, r := d.MemExportToShareableHandle(h, driver.HandlePosixFD)
		if r != driver.Success {
			return fmt.Errorf("export: %v: %v", r, m.Log())
		}
		if err := unix.Sendmsg(int(c.Files[0].Fd()), []byte{0}, unix.UnixRights(exported(s)), nil, 0); err != nil {
			return err
		}
		if err := unix.Close(exported(s)); err != nil {
			return err
		}
		if err := c.Send(true); err != nil {
			return err
		}
		var wait bool
		return c.Recv(&wait)
	})
	// It takes what it gets, one chunk at a time, and tells how many.
	reexec.Register("sim: taker in a folder", func(c *reexec.Child) error {
		_, d, err := inFolder(c, func(f string) Options { return small(f, crowdChunks) })
		if err != nil {
			return err
		}
		var begin bool
		if err := c.Recv(&begin); err != nil {
			return err
		}
		n := 0
		for {
			_, r := d.MemCreate(chunk, on(0, 0))
			if r == driver.OutOfMemory {
				break
			}
			if r != driver.Success {
				return fmt.Errorf("create: %v", r)
			}
			n++
		}
		if err := c.Send(n); err != nil {
			return err
		}
		return c.Recv(&begin)
	})
	// It makes, exports, sends, imports and drops memory until it is killed.
	reexec.Register("sim: busy in a folder", func(c *reexec.Child) error {
		m, d, err := inFolder(c, func(f string) Options { return small(f, crowdChunks) })
		if err != nil {
			return err
		}
		seed, _ := strconv.ParseUint(c.Args[1], 10, 64)
		rng := rand.New(rand.NewPCG(seed, 0))
		send, receive := int(c.Files[0].Fd()), int(c.Files[1].Fd())
		var own []driver.MemHandle
		if err := c.Send(true); err != nil {
			return err
		}
		for {
			switch rng.IntN(5) {
			case 0, 1:
				h, r := d.MemCreate(uint64(1+rng.IntN(2))*chunk, on(0, driver.HandlePosixFD))
				if r == driver.OutOfMemory {
					break
				}
				if r != driver.Success {
					return fmt.Errorf("create: %v", r)
				}
				own = append(own, h)
				s, r := d.MemExportToShareableHandle(h, driver.HandlePosixFD)
				if r != driver.Success {
					return fmt.Errorf("export: %v: %v", r, m.Log())
				}
				_ = unix.Sendmsg(send, []byte{0}, unix.UnixRights(exported(s)), nil, unix.MSG_DONTWAIT)
				_ = unix.Close(exported(s))
			case 2:
				fd, err := receiveFD(receive, unix.MSG_DONTWAIT)
				if err != nil {
					break
				}
				h, r := d.MemImportFromShareableHandle(fdHandle(fd), driver.HandlePosixFD)
				if r != driver.Success {
					return fmt.Errorf("import: %v: %v", r, m.Log())
				}
				own = append(own, h)
				_ = unix.Close(fd)
			default:
				if len(own) > 0 {
					i := rng.IntN(len(own))
					d.MemRelease(own[i])
					own = append(own[:i], own[i+1:]...)
				}
			}
		}
	})
}

func receiveFD(socket, flags int) (int, error) {
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(socket, make([]byte, 1), oob, flags|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return -1, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) == 0 {
		return -1, errors.Join(errors.New("no descriptor came"), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return -1, err
	}
	return fds[0], nil
}

// The folder's owner, group and permissions decide which users may take part.
func TestAnotherUserMayTakePart(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can start a process of another user")
	}
	folder := t.TempDir()
	for dir, mode := range map[string]os.FileMode{folder: 0o770, filepath.Dir(folder): 0o755} {
		require.NoError(t, os.Chmod(dir, mode))
	}
	r := start(t, small(folder, crowdChunks))
	before := r.free()
	ours, theirs := socketpair(t)
	child := reexec.Command(t, "sim: exporter in a folder", folder, "unprivileged")
	child.ExtraFiles = []*os.File{theirs}
	child.Start()
	var sent bool
	child.Recv(&sent)
	require.Equal(t, before-chunk, r.free())
	fd, err := receiveFD(int(ours.Fd()), 0)
	require.NoError(t, err)
	h, res := r.MemImportFromShareableHandle(fdHandle(fd), driver.HandlePosixFD)
	r.ok(res)
	require.NoError(t, unix.Close(fd))
	child.Kill()
	require.Equal(t, pattern(chunk), r.bytes(r.mapHandle(h), chunk))
	r.ok(r.MemRelease(h))

	require.NoError(t, os.Chmod(folder, 0o700))
	stranger := reexec.Command(t, "sim: exporter in a folder", folder, "unprivileged")
	stranger.ExtraFiles = []*os.File{theirs}
	stranger.Start()
	require.Error(t, stranger.Exit())
	require.Contains(t, stranger.Log(), "permission denied")
}

func TestMemoryInASocketIsTaken(t *testing.T) {
	folder := t.TempDir()
	ours, theirs := socketpair(t)
	child := reexec.Command(t, "sim: exporter in a folder", folder)
	child.ExtraFiles = []*os.File{theirs}
	child.Start()
	require.NoError(t, theirs.Close())
	var sent bool
	child.Recv(&sent)
	u, err := Inspect(folder)
	require.NoError(t, err)
	require.Equal(t, child.Process.Pid, u.Exported[0].Maker)
	child.Kill()
	// Only the socket's queue has it now.
	u, err = Inspect(folder)
	require.NoError(t, err)
	require.Empty(t, u.Processes)
	require.Equal(t, []ExportedMemory{{Size: chunk, Open: true}}, u.Exported)
	require.Equal(t, chunk, u.Devices[0].Taken)

	fd, err := receiveFD(int(ours.Fd()), 0)
	require.NoError(t, err)
	r := start(t, small(folder, crowdChunks))
	require.Equal(t, (crowdChunks-1)*chunk, r.free())
	h, res := r.MemImportFromShareableHandle(fdHandle(fd), driver.HandlePosixFD)
	r.ok(res)
	require.NoError(t, unix.Close(fd))
	require.Equal(t, pattern(chunk), r.bytes(r.mapHandle(h), chunk))
	r.ok(r.MemRelease(h))
}

func TestASocketThatIsClosedFreesItsMemory(t *testing.T) {
	folder := t.TempDir()
	ours, theirs := socketpair(t)
	child := reexec.Command(t, "sim: exporter in a folder", folder)
	child.ExtraFiles = []*os.File{theirs}
	child.Start()
	require.NoError(t, theirs.Close())
	var sent bool
	child.Recv(&sent)
	child.Kill()
	require.Equal(t, chunk, taken(t, folder))
	require.NoError(t, ours.Close())
	// The system takes what lies in sockets apart in its own time.
	require.Eventually(t, func() bool { return taken(t, folder) == 0 }, time.Minute, time.Millisecond)
	noFiles(t, folder)
}

func TestARaceForMemoryIsExact(t *testing.T) {
	folder := t.TempDir()
	var children []*reexec.Cmd
	for range 4 {
		c := reexec.Command(t, "sim: taker in a folder", folder)
		c.Start()
		children = append(children, c)
	}
	for _, c := range children {
		c.Send(true)
	}
	sum, got := 0, make([]int, len(children))
	for i, c := range children {
		c.Recv(&got[i])
		sum += got[i]
	}
	require.Equal(t, crowdChunks, sum)
	for i, c := range children {
		require.Equal(t, sum*chunk, taken(t, folder))
		c.Kill()
		sum -= got[i]
	}
	require.Zero(t, taken(t, folder))
}

func TestProcessesAreKilledAtAnyMoment(t *testing.T) {
	folder := t.TempDir()
	watcher := start(t, small(folder, crowdChunks))
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	send, receive := os.NewFile(uintptr(fds[0]), "send"), os.NewFile(uintptr(fds[1]), "receive")
	defer send.Close()
	defer receive.Close()
	run := func(seed int) *reexec.Cmd {
		c := reexec.Command(t, "sim: busy in a folder", folder, strconv.Itoa(seed))
		c.ExtraFiles = []*os.File{send, receive}
		c.Start()
		return c
	}
	const crowd, kills = 3, 30
	var children []*reexec.Cmd
	for i := range crowd {
		children = append(children, run(i))
	}
	for i := range kills {
		c := children[0]
		var running bool
		c.Recv(&running)
		time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
		c.Kill()
		children = append(children[1:], run(crowd+i))
		u, err := Inspect(folder)
		require.NoError(t, err)
		require.LessOrEqual(t, u.Devices[0].Taken, u.Devices[0].Memory)
	}
	for _, c := range children {
		c.Kill()
		require.NotContains(t, c.Log(), "import")
		require.NotContains(t, c.Log(), "export")
	}
	// What lies in the socket is still held.
	for {
		fd, err := receiveFD(int(receive.Fd()), unix.MSG_DONTWAIT)
		if err != nil {
			break
		}
		require.NotZero(t, taken(t, folder))
		require.NoError(t, unix.Close(fd))
	}
	require.Zero(t, taken(t, folder))
	require.Equal(t, crowdChunks*chunk, watcher.free())
	noFiles(t, folder)
}

// A file system that runs full fails an export. What was exported has its room: a
// page without room would kill the process that touches it.
func TestAFullFileSystemFailsAnExport(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=14m,mode=0700"); err != nil {
		t.Skipf("this process may not mount a file system: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	r := start(t, small(dir+"/machine", crowdChunks))
	var all []driver.Ptr
	refused := 0
	for range 8 {
		h, res := r.MemCreate(chunk, on(0, driver.HandlePosixFD))
		r.ok(res)
		t.Cleanup(func() { r.ok(r.MemRelease(h)) })
		all = append(all, r.mapHandle(h))
		s, res := r.MemExportToShareableHandle(h, driver.HandlePosixFD)
		if res != driver.Success {
			r.is(driver.OperatingSystem, res)
			refused++
			continue
		}
		require.NoError(t, unix.Close(exported(s)))
	}
	require.Positive(t, refused)
	require.Less(t, refused, len(all))
	require.Contains(t, strings.Join(r.m.Log(), "\n"), "make room, or take a folder on another file system")
	for _, p := range all { // exported or not, the memory is there
		r.ok(r.MemsetD8Async(r.ctx, p, 7, chunk, driver.StreamNull))
	}
	r.ok(r.StreamSynchronize(r.ctx, driver.StreamNull))
}
