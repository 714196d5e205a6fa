//go:build linux && (amd64 || arm64)

package sim

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// mappingHog takes all mappings that a process may have.
type mappingHog struct {
	all  []byte
	next int
}

func newMappingHog() (*mappingHog, error) {
	all, err := unix.Mmap(-1, 0, os.Getpagesize()<<17, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	return &mappingHog{all: all}, err
}

// acquire uses up the mappings that remain. No page is of the kind of the one before: a mapping
// for each.
func (h *mappingHog) acquire() error {
	page := os.Getpagesize()
	kinds := [2]int{unix.PROT_READ, unix.PROT_READ | unix.PROT_WRITE}
	for unix.Mprotect(h.all[h.next:h.next+page], kinds[h.next/page%2]) == nil {
		if h.next += page; h.next == len(h.all) {
			return errors.New("there was always another mapping")
		}
	}
	return nil
}

// exhausted makes the call without a mapping left, until it fails. The runtime gives a
// mapping back at any moment: taken again until the call finds none.
func (h *mappingHog) exhausted(call, undo func() driver.Result) (driver.Result, error) {
	for range 1000 {
		if err := h.acquire(); err != nil {
			return 0, err
		}
		if r := call(); r != driver.Success {
			return r, nil
		}
		if r := undo(); r != driver.Success {
			return r, fmt.Errorf("undo: %v", r)
		}
	}
	return driver.Success, nil
}

func (h *mappingHog) close() error { return unix.Munmap(h.all) }

func mappingCount(t *testing.T) int {
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	return bytes.Count(maps, []byte{'\n'})
}

// However many small pieces there are, and in whatever order they are freed, they take
// few mappings, and what is new reads zero.
func TestSmallPiecesShareMappings(t *testing.T) {
	for _, row := range []struct {
		what  string
		alloc func(r *rig, n uint64) unsafe.Pointer
		free  func(r *rig, p unsafe.Pointer) driver.Result
	}{
		{"managed", func(r *rig, n uint64) unsafe.Pointer {
			p, res := r.MemAllocManaged(r.ctx, n, driver.AttachGlobal)
			r.ok(res)
			return hostPointer(p)
		}, func(r *rig, p unsafe.Pointer) driver.Result { return r.MemFree(r.ctx, driver.Ptr(uintptr(p))) }},
		{"pinned", func(r *rig, n uint64) unsafe.Pointer {
			p, res := r.MemHostAlloc(r.ctx, n, 0)
			r.ok(res)
			return p
		}, func(r *rig, p unsafe.Pointer) driver.Result { return r.MemFreeHost(r.ctx, p) }},
	} {
		t.Run(row.what, func(t *testing.T) {
			r := start(t, Options{})
			random := rand.New(rand.NewPCG(1, 2))
			live := map[unsafe.Pointer]uint64{}
			before := mappingCount(t)
			for range 20_000 {
				if len(live) < 2000 || random.IntN(2) == 0 {
					n := 1 + random.Uint64N(2*uint64(os.Getpagesize()))
					p := row.alloc(r, n)
					b := unsafe.Slice((*byte)(p), n)
					if bytes.Count(b, []byte{0}) != len(b) || live[p] != 0 {
						t.Fatalf("%d bytes at %p are not new", n, p)
					}
					b[0], b[n-1] = 1, 1
					live[p] = n
					continue
				}
				for p := range live {
					r.ok(row.free(r, p))
					delete(live, p)
					break
				}
			}
			require.Less(t, mappingCount(t)-before, 200, "%d pieces", len(live))
			for p := range live {
				r.ok(row.free(r, p))
			}
		})
	}
}

func TestPiecesAreChargedToTheMemory(t *testing.T) {
	page := os.Getpagesize()
	r := start(t, Options{HostMemory: 16 * page})
	var all []unsafe.Pointer
	for range 16 {
		p, res := r.MemHostAlloc(r.ctx, uint64(page), 0)
		r.ok(res)
		all = append(all, p)
	}
	_, res := r.MemHostAlloc(r.ctx, 1, 0)
	r.is(driver.OutOfMemory, res)
	r.ok(r.MemFreeHost(r.ctx, all[1]))
	all[1], res = r.MemHostAlloc(r.ctx, 1, 0)
	r.ok(res)
	for _, p := range all {
		r.ok(r.MemFreeHost(r.ctx, p))
	}
	require.Empty(t, r.m.pinnedSlabs.slabs)
}

func init() {
	reexec.Register("sim: pinned memory in the middle, without a mapping left", func(*reexec.Child) error {
		m, err := New(Options{})
		if err != nil {
			return err
		}
		d := driver.Of(m)
		d.Init()
		ctx, r := d.DevicePrimaryCtxRetain(0)
		if r != driver.Success {
			return fmt.Errorf("context: %v", r)
		}
		// Neighbors, which the kernel joins to one mapping: to free one of them cuts it.
		var all []unsafe.Pointer
		for range 64 {
			p, r := d.MemHostAlloc(ctx, 4*slabPiece, 0)
			if r != driver.Success {
				return fmt.Errorf("pinned memory: %v", r)
			}
			all = append(all, p)
		}
		hog, err := newMappingHog()
		if err != nil {
			return err
		}
		free := 1
		for ; len(m.stuck) == 0; free += 2 {
			if free >= len(all) {
				return errors.New("the system took everything back")
			}
			if err := hog.acquire(); err != nil {
				return err
			}
			if r := d.MemFreeHost(ctx, all[free]); r != driver.Success {
				return fmt.Errorf("free: %v", r)
			}
		}
		if err := hog.close(); err != nil {
			return err
		}
		for i, p := range all {
			if i%2 == 1 && i < free {
				continue
			}
			if r := d.MemFreeHost(ctx, p); r != driver.Success {
				return fmt.Errorf("free: %v", r)
			}
		}
		if len(m.stuck) > 0 {
			return fmt.Errorf("still in use: %q", m.Log())
		}
		if r := d.DevicePrimaryCtxRelease(0); r != driver.Success {
			return fmt.Errorf("context: %v", r)
		}
		return m.Close()
	})
}

// What the system does not take back stays in use and is freed later.
func TestMemoryThatTheSystemDoesNotTakeBack(t *testing.T) {
	needLinux(t)
	c := reexec.Command(t, "sim: pinned memory in the middle, without a mapping left")
	c.Env = append(os.Environ(), "GOGC=off")
	c.Start()
	c.Wait()
}

func TestPieces(t *testing.T) {
	dropped := 0
	h := shelf{
		make: func() ([]byte, error) { return osmem.Alloc(slabSize) },
		drop: func(b []byte) error { dropped++; return osmem.Free(b) },
	}
	a, err := h.acquire(slabPiece)
	require.NoError(t, err)
	b, err := h.acquire(slabPiece)
	require.NoError(t, err)
	require.Same(t, a.of, b.of)
	a.bytes[0] = 1
	a.free()
	b.free()
	require.Equal(t, 1, dropped, "with its last piece")
	require.Panics(t, b.free, "twice")
	h.make = func() ([]byte, error) { return nil, errors.New("none") }
	_, err = h.acquire(slabPiece)
	require.EqualError(t, err, "none")
}
