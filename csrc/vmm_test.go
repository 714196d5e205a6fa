//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc_test

import (
	"encoding/binary"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func descriptorOf(s driver.ShareableHandle) int { return int(int32(binary.NativeEndian.Uint32(s[:]))) }

func ofDescriptor(fd int32) (s driver.ShareableHandle) {
	binary.NativeEndian.PutUint32(s[:], uint32(fd))
	return s
}

// The fake driver leaves its descriptors open on exec, as drivers may.
func TestExportedDescriptorIsClosedOnExec(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	for _, d := range []driver.Driver{d, d.Foreign()} {
		s, r := d.MemExportToShareableHandle(handle, driver.HandlePosixFD)
		require.Equal(t, driver.Success, r)
		require.Equal(t, make([]byte, 60), s[4:], "a descriptor has four bytes")
		require.True(t, closedOnExec(descriptorOf(s)))
	}
	calls := f.calls(t)
	require.Equal(t, le(handle, uint32(1), uint64(0)), calls[1].Args)
}

// A failed export made no descriptor, so none may be touched: number 0 is in
// use.
func TestFailedExportTouchesNoDescriptor(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	before, err := unix.FcntlInt(0, unix.F_GETFD, 0)
	require.NoError(t, err)
	f.returns("cuMemExportToShareableHandle", driver.InvalidValue)
	f.also("cuMemGetHandleForAddressRange", driver.NotSupported)
	_, r := d.MemExportToShareableHandle(handle, driver.HandlePosixFD)
	require.Equal(t, driver.InvalidValue, r)
	_, r = d.MemGetHandleForAddressRange(ours, ptr, 1<<21, 0)
	require.Equal(t, driver.NotSupported, r)
	after, err := unix.FcntlInt(0, unix.F_GETFD, 0)
	require.NoError(t, err)
	require.Equal(t, before, after)
}

// While another goroutine forks, no descriptor is made: the child would keep
// it, and it pins memory.
func TestDescriptorsWaitForAFork(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	for name, export := range map[string]func() int{
		"export": func() int {
			s, _ := d.MemExportToShareableHandle(handle, driver.HandlePosixFD)
			return descriptorOf(s)
		},
		"DMA-BUF": func() int {
			fd, _ := d.MemGetHandleForAddressRange(ours, ptr, 1<<21, 0)
			return int(fd)
		},
	} {
		t.Run(name, func(t *testing.T) {
			syscall.ForkLock.Lock()
			done := make(chan int)
			go func() { done <- export() }()
			select {
			case <-done:
				syscall.ForkLock.Unlock()
				t.Fatal("a descriptor was made during a fork")
			case <-time.After(30 * time.Millisecond):
			}
			require.Empty(t, f.calls(t), "the driver was called during a fork")
			syscall.ForkLock.Unlock()
			require.True(t, closedOnExec(<-done))
			f.calls(t)
		})
	}
	// A handle that is no descriptor has no reason to wait.
	syscall.ForkLock.Lock()
	_, r := d.MemExportToShareableHandle(handle, driver.HandleFabric)
	syscall.ForkLock.Unlock()
	require.Equal(t, driver.Success, r)
	require.NoError(t, exec.CommandContext(t.Context(), "true").Run(), "the lock is free again")
}

// A descriptor is passed as the pointer's value, a fabric handle behind it.
func TestImportForms(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	for fd, want := range map[int32][]byte{
		17: le(uint64(17), uint32(1)),
		-1: le(^uint64(0), uint32(1)),
	} {
		h, r := d.MemImportFromShareableHandle(ofDescriptor(fd), driver.HandlePosixFD)
		require.Equal(t, driver.Success, r)
		require.Equal(t, driver.MemHandle(0x4000000000000003), h)
		require.Equal(t, want, f.calls(t)[1].Args)
	}
}

func TestSetAccessWithNothing(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	require.Equal(t, driver.Success, d.MemSetAccess(ptr, 1<<21, nil))
	require.Equal(t, le(ptr, uint64(1<<21), uint64(0)), f.calls(t)[1].Args)
}

// The narrow attributes leave the upper half of the value clear.
func TestPointerAttributeWidths(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	for a, want := range map[driver.PointerAttribute]uint64{
		driver.PointerContext:       0x7f00000000d1,
		driver.PointerMemoryType:    0x000000d2,
		driver.PointerIsManaged:     0x000000d8,
		driver.PointerDeviceOrdinal: 0x000000d9,
		driver.PointerRangeStart:    0x7f00000000db,
		driver.PointerMapped:        0x000000dd,
	} {
		v, r := d.PointerGetAttribute(ours, a, ptr)
		require.Equal(t, driver.Success, r)
		require.Equal(t, want, v, "attribute %d", a)
	}
}
