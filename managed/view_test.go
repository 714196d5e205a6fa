package managed_test

import (
	"testing"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/stretchr/testify/require"
)

// elsewhere is managed memory that other code made, or, if not managed, plain
// device memory.
func elsewhere(t testing.TB, d *cuda.Device, n uint64, isManaged bool) cuda.Ptr {
	t.Helper()
	c, err := core.ContextOf("test", d)
	require.NoError(t, err)
	drv := c.System().Drv
	var p driver.Ptr
	var r driver.Result
	if isManaged {
		p, r = drv.MemAllocManaged(c.Handle, n, driver.AttachGlobal)
	} else {
		p, r = drv.MemAlloc(c.Handle, n)
	}
	require.Equal(t, driver.Success, r)
	t.Cleanup(func() { require.Equal(t, driver.Success, drv.MemFree(c.Handle, p)) })
	return cuda.Ptr(p)
}

func hinted(t testing.TB, d *cuda.Device) *managed.Buffer {
	t.Helper()
	b, err := managed.View(d, elsewhere(t, d, mib, false), mib, managed.ViewOptions{Hint: true})
	require.NoError(t, err)
	closed(t, b)
	return b
}

func TestViewOfMemoryMadeElsewhere(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		p, s := elsewhere(t, d, 4*mib, true), stream(t, d)
		v, err := managed.View(d, p+mib, 2*mib, managed.ViewOptions{})
		require.NoError(t, err)
		require.True(t, v.Managed())
		require.Equal(t, p+mib, v.Ptr())
		require.NoError(t, v.SetPreferred(d.Location()))
		require.NoError(t, v.AccessedBy().Assign(cuda.OnHost(), d.Location()))
		require.NoError(t, v.Prefetch(s, d.Location()))
		require.NoError(t, v.Host(s, func(data []byte) error { data[0] = 7; return nil }))
		got := make([]byte, 1)
		require.NoError(t, s.Download(got, p+mib))
		require.Equal(t, byte(7), got[0])

		c, err := v.Clone()
		require.NoError(t, err)
		require.NoError(t, v.Close())
		require.ErrorIs(t, v.Prefetch(s, cuda.OnHost()), cuda.ErrClosed)
		require.NoError(t, c.Prefetch(s, cuda.OnHost()), "the memory stays")
		require.NoError(t, c.CloseAfter(s))
		require.NoError(t, s.Memset(p, 1, 4*mib), "its maker has it still")
		require.NoError(t, s.Synchronize())

		for _, hint := range []bool{false, true} {
			_, err = managed.View(d, p+mib, 4*mib, managed.ViewOptions{Hint: hint})
			require.ErrorIs(t, err, cuda.ErrOutOfRange)
			require.ErrorContains(t, err, "4 MiB from")
		}
	})
}

func TestViewOfMemoryThatIsNotManaged(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		p := elsewhere(t, d, mib, false)
		_, err := managed.View(d, p, mib, managed.ViewOptions{})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorContains(t, err, "not managed memory")

		// A hint does nothing, and says no error.
		b, s := hinted(t, d), stream(t, d)
		require.False(t, b.Managed())
		for _, err := range []error{
			b.SetReadMostly(true), b.SetPreferred(d.Location()), b.AccessedBy().Add(cuda.OnHost()),
			b.AccessedBy().Assign(cuda.OnHost(), d.Location()), b.AccessedBy().Remove(cuda.OnHost()),
			b.Prefetch(s, cuda.OnHost()), b.Discard(s), b.DiscardPrefetch(s, cuda.OnHost()), b.Attach(s, managed.AttachHost),
			managed.GPUFirst(s, b.Range),
		} {
			require.NoError(t, err)
		}
		mostly, err := b.ReadMostly()
		require.NoError(t, err)
		require.False(t, mostly)
		l, err := b.LastPrefetch()
		require.NoError(t, err)
		require.Zero(t, l)
		all, err := b.AccessedBy().All()
		require.NoError(t, err)
		require.Empty(t, all)
		// But nonsense is nonsense, and the CPU does not reach it.
		require.ErrorIs(t, b.Prefetch(s, cuda.OnDevice(77)), cuda.ErrInvalidArgument)
		require.ErrorIs(t, b.Host(s, func([]byte) error { return nil }), cuda.ErrNotSupported)
		_, err = b.Bytes()
		require.ErrorIs(t, err, cuda.ErrNotSupported)
	})
}

// A hint stays one where the driver or the device could not do what is asked.
func TestAHintIsOneEverywhere(t *testing.T) {
	for name, options := range map[string]sim.Options{
		"an older driver": sim.OlderDriver(12010), "no concurrent access": sim.WithoutConcurrentManagedAccess(),
	} {
		_, d := open(t, options)
		b, s := hinted(t, d), stream(t, d)
		for _, err := range []error{
			b.SetPreferred(d.Location()), b.SetPreferred(cuda.OnHostNUMA(0)), b.AccessedBy().Assign(d.Location()),
			b.Prefetch(s, d.Location()), b.Prefetch(s, cuda.OnHostNUMA(0)), b.Discard(s), b.DiscardPrefetch(s, d.Location()),
			managed.GPUFirst(s, b.Range),
		} {
			require.NoError(t, err, name)
		}
	}
}

// A value that the driver did not write is not used.
func TestAHintIsNotMadeOfAnError(t *testing.T) {
	m, d := open(t)
	p := elsewhere(t, d, mib, false)
	for _, call := range []string{"cuMemRangeGetAttribute", "cuPointerGetAttribute"} {
		remove := m.Inject(sim.Fault{Call: call, Result: 999, Times: -1})
		_, err := managed.View(d, p, mib, managed.ViewOptions{Hint: true})
		remove()
		require.ErrorContains(t, err, call)
	}
}

// Memory is attached whole.
func TestAttachingAView(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		s, p := stream(t, d), elsewhere(t, d, 2*mib, true)
		for _, part := range []struct {
			at cuda.Ptr
			n  int
		}{{p, mib}, {p + mib, mib}} {
			v, err := managed.View(d, part.at, part.n, managed.ViewOptions{})
			require.NoError(t, err)
			closed(t, v)
			err = v.Attach(s, managed.AttachHost)
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			require.ErrorContains(t, err, "2 MiB of managed memory")
		}
		ours := buffer(t, d, 100)
		for p, n := range map[cuda.Ptr]int{p: 2 * mib, ours.Ptr(): ours.Len()} {
			v, err := managed.View(d, p, n, managed.ViewOptions{})
			require.NoError(t, err)
			closed(t, v)
			require.NoError(t, v.Attach(s, managed.AttachGlobal))
		}
		require.NoError(t, s.Synchronize())
	})
}

func TestViewOfNothing(t *testing.T) {
	_, d := open(t)
	p := elsewhere(t, d, mib, true)
	for _, row := range []struct {
		p cuda.Ptr
		n int
	}{{0, mib}, {p, 0}, {p, -1}, {p, 1 << 60}, {^cuda.Ptr(0) - 10, 1 << 40}, {12345, 10}} {
		_, err := managed.View(d, row.p, row.n, managed.ViewOptions{})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument, "%d bytes at %v", row.n, row.p)
	}
	_, err := managed.View(nil, p, mib, managed.ViewOptions{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
}

// Memory of the operating system is managed where the device pages it.
func TestViewOfTheSystemsMemory(t *testing.T) {
	pages := sim.Options{Devices: []sim.DeviceOptions{{Attributes: map[int]int{int(driver.AttrPageableMemoryAccess): 1}}}}
	check := func(t *testing.T, d *cuda.Device) {
		mem, err := osmem.Alloc(4 * mib)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, osmem.Free(mem)) })
		p := cuda.Ptr(uintptr(unsafe.Pointer(&mem[0])))
		s := stream(t, d)
		c, err := d.Capabilities()
		require.NoError(t, err)
		v, err := managed.View(d, p, len(mem), managed.ViewOptions{})
		if !c.PageableMemoryAccess {
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			return
		}
		require.NoError(t, err)
		closed(t, v)
		copy(mem, pattern(len(mem), 3))
		require.NoError(t, v.Prefetch(s, d.Location()))
		dst := buffer(t, d, len(mem))
		require.NoError(t, s.Copy(dst.Ptr(), v.Ptr(), len(mem)))
		got := make([]byte, len(mem))
		require.NoError(t, s.Download(got, dst.Ptr()))
		require.Equal(t, pattern(len(mem), 3), got)
		require.NoError(t, s.Memset(v.Ptr(), 9, mib))
		require.NoError(t, v.Host(s, func(data []byte) error {
			require.Equal(t, byte(9), data[mib-1])
			return nil
		}))
		require.Equal(t, byte(9), mem[0])
	}
	gputest.Each(t, check)
	t.Run("pageable memory access", func(t *testing.T) {
		if !osmem.Linux {
			t.Skip("the system does not tell what is mapped")
		}
		m, d := open(t, pages)
		check(t, d)
		mem, err := osmem.Alloc(mib)
		require.NoError(t, err)
		v, err := managed.View(d, cuda.Ptr(uintptr(unsafe.Pointer(&mem[0]))), mib, managed.ViewOptions{})
		require.NoError(t, err)
		require.NoError(t, v.SetPreferred(cuda.OnHost()))
		l, err := v.Preferred()
		require.NoError(t, err)
		require.Equal(t, cuda.OnHost(), l)
		require.NoError(t, v.Prefetch(nil, cuda.OnDevice(0)))
		require.Equal(t, []int{mib, 0}, resident(m, v.Range, 1))
		require.NoError(t, v.Host(nil, nothing))
		require.NoError(t, v.Discard(nil))
		require.Equal(t, []int{mib, 0}, resident(m, v.Range, 1))
		require.NoError(t, v.Close())
		require.NoError(t, osmem.Free(mem))
		_, err = managed.View(d, v.Ptr(), 1<<40, managed.ViewOptions{})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	})
}
