//go:build linux && (amd64 || arm64)

package osmem

import (
	"os"
	"runtime/debug"
	"testing"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// at reads an address of the window as a slice.
func at(addr uint64, n int) []byte {
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&addr)), n)
}

// faults tells whether touching the address stops the program.
func faults(t *testing.T, addr uint64, write bool) (faulted bool) {
	t.Helper()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { faulted = recover() != nil }()
	b := at(addr, 1)
	if write {
		b[0]++
	} else if b[0] == 77 {
		t.Log("read")
	}
	return false
}

func TestWindow(t *testing.T) {
	base, err := Window(1<<40, 1<<30)
	require.NoError(t, err)
	require.Zero(t, base%(1<<30))
	page := host.PageSize()
	arena, err := NewArena(1<<20, true)
	require.NoError(t, err)
	shared, err := NewShared("test", 4*page)
	require.NoError(t, err)
	fd, err := shared.Export()
	require.NoError(t, err)
	imported, err := OpenShared(fd)
	require.NoError(t, err)
	require.NoError(t, unix.Close(fd))

	for what, row := range map[string]struct {
		place func(addr, off, n uint64, access Access) error
		bytes []byte
	}{
		"arena":    {arena.Place, arena.Run(0, 4*page)},
		"shared":   {shared.Place, shared.Bytes()},
		"imported": {imported.Place, imported.Bytes()},
	} {
		addr := base + 17*page
		require.True(t, faults(t, addr, false), what)
		require.NoError(t, row.place(addr, page, 2*page, AccessReadWrite), what)
		at(addr, 1)[0] = 42
		require.Equal(t, byte(42), row.bytes[page], what)
		row.bytes[3*page-1] = 43
		require.Equal(t, byte(43), at(addr, int(2*page))[2*page-1], what)
		require.True(t, faults(t, addr-1, false), what)
		require.True(t, faults(t, addr+2*page, false), what)
		require.NoError(t, Protect(addr, 2*page, AccessRead))
		require.False(t, faults(t, addr, false), what)
		require.True(t, faults(t, addr, true), what)
		require.NoError(t, Protect(addr, 2*page, AccessNone))
		require.True(t, faults(t, addr, false), what)
		require.NoError(t, Clear(addr, 2*page))
		require.True(t, faults(t, addr, false), what)
		require.NoError(t, row.place(addr, 0, page, AccessRead))
		require.True(t, faults(t, addr, true), what)
		require.NoError(t, Clear(addr, page))
		require.Panics(t, func() { _ = row.place(addr, 1<<20, page, AccessRead) }, what)
	}
	require.NoError(t, imported.Close())
	require.NoError(t, shared.Close())
	require.NoError(t, arena.Close())
}

func TestSharedIsHeldByDescriptorsAndMappings(t *testing.T) {
	s, err := NewShared("test", host.PageSize())
	require.NoError(t, err)
	defer s.Close()
	require.False(t, s.Held())
	fd, err := s.Export()
	require.NoError(t, err)
	require.True(t, s.Held())
	other, err := s.Export()
	require.NoError(t, err)
	dup, err := unix.Dup(fd)
	require.NoError(t, err)
	require.NoError(t, unix.Close(fd))
	require.NoError(t, unix.Close(other))
	require.True(t, s.Held(), "a duplicate holds it")
	imported, err := OpenShared(dup)
	require.NoError(t, err)
	require.Equal(t, s.ID(), imported.ID())
	id, err := IdentifyShared(dup)
	require.NoError(t, err)
	require.Equal(t, s.ID(), id)
	require.NoError(t, unix.Close(dup))
	require.True(t, s.Held(), "a mapping holds it")
	s.Bytes()[0] = 9
	require.Equal(t, byte(9), imported.Bytes()[0])
	require.NoError(t, imported.Close())
	require.False(t, s.Held())
	require.NoError(t, s.Close())
	require.NoError(t, s.Close(), "twice")
}

func TestSharedCannotBeResized(t *testing.T) {
	s, err := NewShared("test", host.PageSize())
	require.NoError(t, err)
	defer s.Close()
	fd, err := s.Export()
	require.NoError(t, err)
	defer unix.Close(fd)
	require.ErrorIs(t, unix.Ftruncate(fd, 0), unix.EPERM)
	require.ErrorIs(t, unix.Ftruncate(fd, 1<<20), unix.EPERM)
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
	require.ErrorIs(t, err, unix.EPERM)
}

func TestForeignDescriptorsAreRefused(t *testing.T) {
	f, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	defer f.Close()
	unsealed, err := memfd("test", host.PageSize(), false)
	require.NoError(t, err)
	defer unix.Close(unsealed)
	readOnly, err := memfd("test", host.PageSize(), false)
	require.NoError(t, err)
	defer unix.Close(readOnly)
	_, err = unix.FcntlInt(uintptr(readOnly), unix.F_ADD_SEALS, seals|unix.F_SEAL_WRITE)
	require.NoError(t, err)
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	for _, fd := range []int{int(f.Fd()), unsealed, readOnly, int(r.Fd()), -1} {
		_, err := OpenShared(fd)
		require.ErrorIs(t, err, ErrNotShared)
		_, _, err = Tail(fd)
		require.ErrorIs(t, err, ErrNotShared)
	}
	_, err = IdentifyShared(-1)
	require.Error(t, err)
}

// Where the system has no huge page left, a process that touches a mapping of one is
// killed.
func TestFilesOfHugePagesAreRefused(t *testing.T) {
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_HUGETLB)
	if err != nil {
		t.Skipf("the system has no huge pages: %v", err)
	}
	defer unix.Close(fd)
	require.NoError(t, unix.Ftruncate(fd, 4<<20))
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	require.NoError(t, err)
	for _, err := range []error{func() error { _, err := OpenShared(fd); return err }(), func() error { _, _, err := Tail(fd); return err }()} {
		require.ErrorIs(t, err, ErrNotShared)
		require.ErrorContains(t, err, "ordinary pages")
	}
}

// A peer may lock what it was sent in every way there is: nothing waits for that.
func TestAPeersLocksDelayNoOther(t *testing.T) {
	s, err := NewShared("test", host.PageSize())
	require.NoError(t, err)
	defer s.Close()
	theirs, err := s.Export()
	require.NoError(t, err)
	exclusive := unix.Flock_t{Type: unix.F_WRLCK}
	require.NoError(t, unix.Flock(theirs, unix.LOCK_EX))
	require.ErrorIs(t, unix.FcntlFlock(uintptr(theirs), unix.F_OFD_SETLK, &exclusive), unix.EAGAIN, "the maker's own lock keeps it out")
	again, err := s.Export()
	require.NoError(t, err)
	imported, err := OpenShared(again)
	require.NoError(t, err)
	require.NoError(t, unix.Close(theirs))
	require.NoError(t, unix.Close(again))
	require.True(t, s.Held(), "the importer holds it")
	require.NoError(t, imported.Close())
	require.False(t, s.Held())

	// Without the maker the lock is to be had, and has nothing to say.
	theirs, err = s.Export()
	require.NoError(t, err)
	defer unix.Close(theirs)
	require.NoError(t, s.Close())
	require.NoError(t, unix.FcntlFlock(uintptr(theirs), unix.F_OFD_SETLK, &exclusive))
	imported, err = OpenShared(theirs)
	require.NoError(t, err)
	require.NoError(t, imported.Close())
}
