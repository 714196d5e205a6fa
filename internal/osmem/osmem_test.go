package osmem

import (
	"bytes"
	"testing"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/stretchr/testify/require"
)

// placed and plain arenas behave alike, wherever they are supported.
func TestArenaReadsZeroUntilWrittenAndAfterDiscard(t *testing.T) {
	const size = 64 << 20
	for _, placeable := range []bool{false, true} {
		a, err := NewArena(size, placeable)
		require.NoError(t, err)
		page := host.PageSize()
		write := func(off, n uint64, v byte) {
			for n > 0 {
				b := a.Run(off, n)
				require.NotEmpty(t, b)
				require.Empty(t, bytes.Trim(b, "\x00"))
				for i := range b {
					b[i] = v
				}
				off, n = off+uint64(len(b)), n-uint64(len(b))
			}
		}
		write(3*page, 5<<20, 1)
		require.NoError(t, a.Discard(4*page, 4<<20))
		require.Equal(t, byte(1), a.Run(4*page-1, 1)[0])
		require.Equal(t, byte(1), a.Run(4*page+4<<20, 1)[0])
		write(4*page, 4<<20, 2)
		require.NoError(t, a.Discard(0, 0))
		require.Panics(t, func() { a.Run(size-1, 2) })
		require.Panics(t, func() { _ = a.Discard(^uint64(0), 2) })
		require.NoError(t, a.Close())
	}
}

func TestAllocIsZeroed(t *testing.T) {
	b, err := Alloc(100)
	require.NoError(t, err)
	require.Equal(t, make([]byte, 100), b)
	b[99] = 1
	require.NoError(t, Free(b))
}

// Memory in huge pages is aligned and zero, and parts of it are freed by themselves.
func TestHugePages(t *testing.T) {
	const n = 3 * HugePage
	for _, last := range []int{0, 1, 2} {
		mem, err := AllocHuge(n)
		require.NoError(t, err)
		require.Len(t, mem, n)
		require.Equal(t, n, cap(mem))
		if Linux {
			require.Zero(t, uintptr(unsafe.Pointer(&mem[0]))%HugePage)
		}
		require.NoError(t, Populate(mem[:HugePage]))
		require.Equal(t, make([]byte, n), mem)
		for k := 1; k <= 3; k++ {
			part := mem[(last+k)%3*HugePage:][:HugePage:HugePage]
			part[0] = 1
			require.NoError(t, Free(part))
		}
	}
}

// The kernel may give the freed addresses to a thread that starts meanwhile, so being mapped
// once proves nothing; being mapped every time does.
func TestFreedHugePagesAreUnmapped(t *testing.T) {
	if !Linux {
		t.Skip("only Linux tells what is mapped")
	}
	for range 20 {
		mem, err := AllocHuge(3 * HugePage)
		require.NoError(t, err)
		part := mem[HugePage:][:HugePage:HugePage]
		at := uint64(uintptr(unsafe.Pointer(&part[0])))
		require.True(t, host.Mapped(at, HugePage))
		require.NoError(t, Free(part))
		unmapped := !host.Mapped(at, HugePage)
		require.NoError(t, Free(mem[:HugePage:HugePage]))
		require.NoError(t, Free(mem[2*HugePage:]))
		if unmapped {
			return
		}
	}
	t.Fatal("20 times, freed memory was still mapped")
}
