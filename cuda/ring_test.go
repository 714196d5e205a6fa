package cuda_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/stretchr/testify/require"
)

// Uploads and downloads of any size and order read and write what a plain
// slice would, from many goroutines, each with a stream and memory of its own.
func TestStagedCopiesAgainstAModel(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		const size = 11<<20 + 7
		var wg sync.WaitGroup
		for g := range 3 {
			s, p := stream(t, d), memory(t, d, size)
			require.NoError(t, s.Memset(p, 0, size))
			wg.Go(func() {
				if err := staged(s, p, size, rand.New(rand.NewPCG(uint64(g), 1))); err != nil {
					t.Errorf("goroutine %d: %v", g, err)
				}
			})
		}
		wg.Wait()
	})
}

func staged(s *cuda.Stream, p cuda.Ptr, size int, rng *rand.Rand) error {
	model := make([]byte, size)
	buf := make([]byte, size)
	for step := range 120 {
		// Mostly small, at times more than everything that can be staged.
		n := rng.IntN(1 << (1 + rng.IntN(24)))
		n = min(n, size)
		off := rng.IntN(size - n + 1)
		at := p + cuda.Ptr(off)
		switch rng.IntN(4) {
		case 0:
			if err := s.Download(buf[:n], at); err != nil {
				return err
			}
			if !bytes.Equal(buf[:n], model[off:off+n]) {
				return fmt.Errorf("step %d: %d bytes at %d differ", step, n, off)
			}
		case 1:
			if err := s.Memset(at, byte(step), n); err != nil {
				return err
			}
			for i := range n {
				model[off+i] = byte(step)
			}
		default:
			for i := range n {
				buf[i] = byte(i*31 + step)
			}
			copy(model[off:], buf[:n])
			if err := s.Upload(at, buf[:n]); err != nil {
				return err
			}
			clear(buf[:n]) // it was staged
		}
	}
	if err := s.Download(buf, p); err != nil {
		return err
	}
	if !bytes.Equal(buf, model) {
		return fmt.Errorf("the end differs")
	}
	return nil
}

// A piece of a download that has landed is not overwritten by the next before
// it was taken.
func TestADownloadKeepsWhatHasLanded(t *testing.T) {
	m, d := open(t)
	s, p := stream(t, d), memory(t, d, 6<<20)
	want := pattern(6<<20, 1)
	up := stream(t, d)
	require.NoError(t, up.Upload(p, want))
	require.NoError(t, up.Synchronize())
	in, drv := core.StreamOf(s), core.SystemOf(d.System()).Drv
	m.OnCall(func(call string) {
		if call == "cuEventQuery" { // every copy so far lands before the driver returns
			drv.StreamSynchronize(in.Ctx.Handle, in.Handle)
		}
	})
	defer m.OnCall(nil)
	require.Equal(t, want, read(t, s, p, 6<<20))
}

// Several goroutines on one stream.
func TestStagedCopiesOfOneStream(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		const size = 3 << 20
		s, p := stream(t, d), memory(t, d, 4*size)
		var wg sync.WaitGroup
		for g := range 4 {
			wg.Go(func() {
				at := p + cuda.Ptr(g*size)
				got := make([]byte, size)
				for round := range 4 {
					want := pattern(size, g*10+round)
					if err := s.Upload(at, want); err != nil {
						t.Error(err)
						return
					}
					if err := s.Download(got, at); err != nil || !bytes.Equal(want, got) {
						t.Errorf("goroutine %d, round %d: %v", g, round, err)
						return
					}
				}
			})
		}
		wg.Wait()
	})
}

// A stream that stands still takes what fits into its own pinned memory, then
// waits, and delays no other stream.
func TestAHeldStreamDelaysNoOther(t *testing.T) {
	m, d := open(t)
	held, free, p := stream(t, d), stream(t, d), memory(t, d, 40<<20)
	m.Hold(held.Handle())
	for i := range 8 {
		require.NoError(t, held.Upload(p+cuda.Ptr(i<<20), pattern(1<<20, i)))
	}
	for i := range 1000 {
		require.NoError(t, free.Upload(p+20<<20, pattern(1000, i)))
	}
	blocked := make(chan error, 1)
	go func() { blocked <- held.Upload(p+8<<20, pattern(10<<20, 8)) }()
	require.NoError(t, free.Upload(p+20<<20, pattern(20<<20, 5)))
	require.Equal(t, pattern(20<<20, 5), read(t, free, p+20<<20, 20<<20))
	select {
	case err := <-blocked:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(glance):
	}
	m.Release(held.Handle())
	require.NoError(t, <-blocked)
	for i := range 8 {
		require.Equal(t, pattern(1<<20, i), read(t, held, p+cuda.Ptr(i<<20), 1<<20))
	}
	require.Equal(t, pattern(10<<20, 8), read(t, held, p+8<<20, 10<<20))
}

// Small uploads share pinned memory, and it is reused once the stream has
// passed: the number of calls for it does not grow with the uploads.
func TestStagingTakesFewBlocks(t *testing.T) {
	m, d := open(t)
	s, p := stream(t, d), memory(t, d, 1<<20)
	for range 20 {
		for range 200 {
			require.NoError(t, s.Upload(p, pattern(5000, 1)))
		}
		require.NoError(t, s.Synchronize())
	}
	require.LessOrEqual(t, m.Count("cuMemHostAlloc"), 8)
	require.NoError(t, s.Close())
	pinned := m.Count("cuMemHostAlloc")
	again := stream(t, d)
	require.NoError(t, again.Upload(p, pattern(5000, 1)))
	require.Equal(t, pinned, m.Count("cuMemHostAlloc"), "a stream's memory goes back to the pool")
}

// Whatever call fails, the stream goes on, and memory that a copy may still use
// is not written.
func TestStagedCopiesThatFail(t *testing.T) {
	for _, call := range []string{"cuMemHostAlloc", "cuEventCreate", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuEventRecord",
		"cuEventSynchronize", "cuStreamIsCapturing"} {
		for after := range 3 {
			t.Run(fmt.Sprintf("%s, after %d", call, after), func(t *testing.T) {
				m, d := open(t)
				s, p := stream(t, d), memory(t, d, 16<<20)
				m.Inject(sim.Fault{Call: call, After: after, Result: cuda.Code(driver.OutOfMemory)})
				want := pattern(4<<20, 2)
				if call != "cuMemHostAlloc" && call != "cuEventCreate" || after == 0 { // then it waits for what it has
					m.Hold(s.Handle())
				}
				up := s.Upload(p, want)
				// What was submitted holds its bytes whatever comes behind it.
				for i := range 4 {
					if err := s.Upload(p+8<<20, pattern(1<<20, i)); up != nil {
						require.NoError(t, err)
					}
				}
				m.Release(s.Handle())
				if err := s.Synchronize(); err != nil { // the fault was for it
					require.ErrorIs(t, err, cuda.ErrOutOfMemory)
					require.NoError(t, s.Synchronize())
				}
				got := make([]byte, 4<<20)
				down := s.Download(got, p)
				m.ClearFaults()
				if up != nil {
					require.ErrorIs(t, up, cuda.ErrOutOfMemory)
					// A prefix has landed, a megabyte at a time.
					got = read(t, s, p, 4<<20)
					landed := 0
					for landed < 4 && bytes.Equal(got[landed<<20:(landed+1)<<20], want[landed<<20:(landed+1)<<20]) {
						landed++
					}
					require.Equal(t, make([]byte, (4-landed)<<20), got[landed<<20:])
				} else if down == nil {
					require.Equal(t, want, got)
				} else {
					require.ErrorIs(t, down, cuda.ErrOutOfMemory)
				}
				require.NoError(t, s.Upload(p, want))
				require.Equal(t, want, read(t, s, p, 4<<20))
			})
		}
	}
}

// A copy that finds no more pinned memory goes on with what the stream has.
func TestStagingGoesOnWithoutMorePinnedMemory(t *testing.T) {
	for _, down := range []bool{false, true} {
		m, d := open(t)
		s, p := stream(t, d), memory(t, d, 6<<20)
		want := pattern(6<<20, 3)
		require.NoError(t, s.Upload(p, want[:1<<20])) // takes one slot
		m.Inject(sim.Fault{Call: "cuMemHostAlloc", Times: -1, Result: cuda.Code(driver.OutOfMemory)})
		if down {
			m.ClearFaults()
			up := stream(t, d)
			require.NoError(t, s.Synchronize())
			require.NoError(t, up.Upload(p, want))
			require.NoError(t, up.Synchronize())
			m.Inject(sim.Fault{Call: "cuMemHostAlloc", Times: -1, Result: cuda.Code(driver.OutOfMemory)})
		} else {
			require.NoError(t, s.Upload(p, want))
		}
		require.True(t, bytes.Equal(want, read(t, s, p, 6<<20)))
		other := stream(t, d)
		if !down {
			require.ErrorIs(t, other.Upload(p, want), cuda.ErrOutOfMemory, "a stream without any says so")
		}
	}
}

// A copy that the driver refuses names its ends.
func TestCopiesThatFailNameTheirEnds(t *testing.T) {
	m, d := open(t)
	s, p := stream(t, d), memory(t, d, 4096)
	fail := func(call string) { m.Inject(sim.Fault{Call: call, Result: cuda.Code(driver.Unknown)}) }
	fail("cuMemcpyHtoDAsync")
	require.ErrorContains(t, s.Upload(p, make([]byte, 100)), fmt.Sprintf("100 bytes to %v on stream", p))
	fail("cuMemcpyDtoHAsync")
	require.ErrorContains(t, s.Download(make([]byte, 1024), p), fmt.Sprintf("1 KiB from %v on stream", p))
	fail("cuMemcpyDtoDAsync")
	require.ErrorContains(t, s.Copy(p+64, p, 1), fmt.Sprintf("1 byte from %v to %v on stream", p, p+64))
}
