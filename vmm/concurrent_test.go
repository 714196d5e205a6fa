package vmm_test

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// within fails the test with every goroutine's stack where f hangs.
func within(t *testing.T, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(testTimeout):
		stacks := make([]byte, 1<<20)
		t.Fatalf("deadlock:\n%s", stacks[:runtime.Stack(stacks, true)])
	}
}

// crowd runs f on n goroutines and waits for them.
func crowd(t *testing.T, n int, f func(i int, r *rand.Rand)) {
	t.Helper()
	within(t, func() {
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() { f(i, rand.New(rand.NewPCG(uint64(i), 1))) })
		}
		wg.Wait()
	})
}

// check is require.NoError for goroutines other than the test's own, which must
// not end it.
func check(t *testing.T, err error, what ...any) {
	t.Helper()
	if err != nil {
		t.Error(append(what, err)...)
	}
}

// expected are the refusals that a crowd round one buffer may meet.
func expected(err error) bool {
	for _, e := range []error{cuda.ErrClosed, cuda.ErrOutOfRange, cuda.ErrCapacity, cuda.ErrNotPermitted} {
		if errors.Is(err, e) {
			return true
		}
	}
	return err == nil
}

func TestACrowdRoundABuffer(t *testing.T) {
	gputest.Unordered(t) // its goroutines work on the same bytes, on streams of their own
	w := newWorld(t, false)
	b, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: 64 * kib64, Chunks: vmm.FixedChunks(kib64)})
	require.NoError(t, err)
	w.own(b)
	peer := w.peer.Location()
	var bad atomic.Pointer[error]
	crowd(t, 200, func(i int, r *rand.Rand) {
		for range 8 {
			var err error
			on := []*cuda.Stream{nil, w.s}[r.IntN(2)]
			switch r.IntN(13) {
			case 0, 1:
				_, err = b.Append(on, make([]byte, 1+r.IntN(2*kib64)))
			case 2:
				_, err = b.AppendUndefined(r.IntN(2 * kib64))
			case 3:
				if err = b.Resize(on, r.IntN(8*kib64)); errors.Is(err, cuda.ErrInUse) {
					err = nil // a fork sees it
				}
			case 4:
				err = b.Clip()
			case 5:
				err = b.ClipAfter(w.s)
			case 6:
				err = b.SetAccess(vmm.Access{Location: peer, Mode: vmm.ReadWrite})
			case 7:
				err = b.SetAccess(vmm.Access{Location: peer, Mode: vmm.NoAccess})
			case 8:
				var part vmm.Slice[byte]
				if part, err = b.Slice(0, b.Len()); err == nil {
					err = part.CopyTo([]*cuda.Stream{on, w.far}[r.IntN(2)], make([]byte, part.Len()))
				}
			case 9:
				var part vmm.Slice[byte]
				if part, err = b.Slice(b.Len()/2, b.Len()*3/4); err == nil {
					err = part.Zero(on)
				}
			case 10:
				var part vmm.Slice[byte]
				if part, err = b.Slice(0, b.Len()/2); err == nil {
					_, err = b.AppendSlice(on, part)
				}
			case 11:
				var fork *vmm.Buffer
				if fork, err = b.Fork(on, b.Len()*3/4, vmm.ForkOptions{}); err == nil {
					err = errors.Join(gputest.Err(fork.Append(on, make([]byte, 100))), fork.CloseAfter(w.s))
				}
			case 12:
				st := b.Stats()
				if st.Committed > st.Reserved {
					err = errors.New("more memory than range")
				}
			}
			if !expected(err) {
				bad.CompareAndSwap(nil, &err)
			}
		}
	})
	if err := bad.Load(); err != nil {
		t.Error(*err)
	}
	w.end()
}

func TestACrowdClosesWhatOthersUse(t *testing.T) {
	for round := range 12 {
		w := newWorld(t, false)
		b := w.buffer(3, both(w, vmm.ReadWrite)...)
		other := w.buffer(2)
		var bad atomic.Pointer[error]
		crowd(t, 24, func(i int, r *rand.Rand) {
			for j := range 6 {
				var err error
				switch {
				case j == 3 && i == round:
					err = b.Close()
				case j == 3 && i == round+1:
					err = b.CloseAfter(w.s, w.far)
				case i%6 == 0: // every one synchronises, so CloseAfter's streams suffice
					_, err = b.Append(nil, make([]byte, 1000))
				case i%6 == 1:
					err = b.ClipAfter(w.s, w.far)
				case i%6 == 2:
					err = b.SetAccess(vmm.Access{Location: w.peer.Location()})
				case i%6 == 3:
					var part vmm.Slice[byte]
					if part, err = b.Slice(0, 100); err == nil {
						_, err = other.AppendSlice(nil, part)
					}
				case i%6 == 4:
					var part, from vmm.Slice[byte]
					if part, err = b.Slice(0, 100); err == nil {
						if from, err = other.Slice(0, 100); err == nil {
							err = part.CopyFromSlice(nil, from)
						}
					}
				default:
					err = b.Resize(nil, r.IntN(4*kib64))
				}
				if !expected(err) {
					bad.CompareAndSwap(nil, &err)
				}
			}
		})
		if err := bad.Load(); err != nil {
			t.Error(*err)
		}
		w.end()
	}
}

func TestBuffersCopyInOppositeDirections(t *testing.T) {
	w := newWorld(t, false)
	a, b := w.buffer(1), w.buffer(1)
	for _, x := range []*vmm.Buffer{a, b} {
		require.NoError(t, x.Resize(nil, 1000))
	}
	crowd(t, 60, func(i int, r *rand.Rand) {
		from, to := a, b
		if i%2 == 0 {
			from, to = b, a
		}
		for range 10 {
			src, err := from.Slice(0, 500)
			check(t, err)
			dst, err := to.Slice(500, 1000)
			check(t, err)
			switch i % 5 {
			case 0, 1:
				check(t, dst.CopyFromSlice(nil, src))
			case 2, 3:
				_, err := to.AppendSlice(w.s, src)
				assert.True(t, expected(err), "%v", err)
			default:
				check(t, to.Resize(nil, 1000))
				check(t, to.Clip())
			}
		}
	})
	w.end()
}

func TestMadeInOneGoroutineAndClosedInAnother(t *testing.T) {
	w := newWorld(t, false)
	made := make(chan closer, 16)
	within(t, func() {
		var makers, closers sync.WaitGroup
		for i := range 32 {
			makers.Go(func() {
				for range 8 {
					var c closer
					var err error
					switch i % 3 {
					case 0:
						c, err = vmm.Create(w.d, kib64, vmm.Properties{})
					case 1:
						c, err = vmm.Reserve(w.d, 4*kib64, vmm.ReserveOptions{})
					default:
						var b *vmm.Buffer
						if b, err = vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: 4 * kib64, Chunks: vmm.FixedChunks(kib64)}); err == nil {
							c, err = b, gputest.Err(b.Append(w.s, pattern(kib64, i)))
						}
					}
					if check(t, err); err == nil {
						made <- c
					}
				}
			})
			closers.Go(func() {
				for c := range made {
					if after, ok := c.(closesAfter); ok && i%2 == 0 {
						check(t, after.CloseAfter(w.s))
						continue
					}
					check(t, c.Close())
				}
			})
		}
		makers.Wait()
		close(made)
		closers.Wait()
	})
	w.end()
}

func TestACrowdRoundAReservation(t *testing.T) {
	w := newWorld(t, false)
	r, err := vmm.Reserve(w.d, 16*kib64, vmm.ReserveOptions{})
	require.NoError(t, err)
	w.own(r)
	crowd(t, 64, func(i int, rnd *rand.Rand) {
		for range 5 {
			a, err := vmm.Create(w.d, kib64, vmm.Properties{})
			if check(t, err); err != nil {
				return
			}
			m, err := r.Map(rnd.IntN(16)*kib64, a)
			check(t, a.Close())
			if err != nil {
				if !errors.Is(err, cuda.ErrInUse) {
					t.Error(err)
				}
				continue
			}
			check(t, m.SetAccess(both(w, vmm.ReadWrite)...))
			// Neighbours come and go, so a run may have a gap.
			if err := r.SetAccess(rnd.IntN(8)*kib64, 2*kib64, both(w, vmm.ReadOnly)...); err != nil {
				assert.True(t, expected(err), "%v", err)
			}
			if rnd.IntN(2) == 0 {
				check(t, m.CloseAfter(w.s, w.far))
			} else {
				check(t, m.Close())
			}
			check(t, m.Close())
		}
	})
	w.end()
}

// TestTheReclaimerComesInTheMiddleOfGrowth has growth take clipped chunks back,
// which the GPU has passed, while the reclaimer is about to unmap them. It could
// not before, since a reader had it.
func TestTheReclaimerComesInTheMiddleOfGrowth(t *testing.T) {
	w := newWorld(t, false)
	b, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: 16 * mib, Chunks: vmm.FixedChunks(2 * mib),
		Memory: vmm.Properties{Location: cuda.OnHostNUMA(0)}})
	require.NoError(t, err)
	w.own(b)
	require.NoError(t, gputest.Err(b.AppendUndefined(8*mib)))
	require.NoError(t, b.Resize(nil, 2*mib))
	w.m.Hold(w.s.Handle())
	require.NoError(t, w.s.Memset(b.Ptr(), 1, 1))
	require.NoError(t, b.ClipAfter(w.s))
	part, err := b.Slice(0, 1)
	require.NoError(t, err)

	making, grown := make(chan struct{}), make(chan error, 1)
	var once sync.Once
	w.m.OnCall(func(call string) {
		if call == "cuMemCreate" {
			once.Do(func() { close(making); time.Sleep(20 * time.Millisecond) })
		}
	})
	within(t, func() {
		check(t, part.Host(func([]byte) error {
			w.m.Release(w.s.Handle())
			time.Sleep(10 * time.Millisecond) // the reclaimer sees that the GPU has passed
			go func() { grown <- gputest.Err(b.AppendUndefined(10 * mib)) }()
			<-making
			return nil
		}))
		check(t, <-grown)
	})
	require.NoError(t, w.drain())
	st := b.Stats()
	require.Equal(t, []int{12 * mib, 6, 0}, []int{st.Committed, st.Chunks, st.Clipped})
	all, err := b.Slice(0, b.Len())
	require.NoError(t, err)
	require.NoError(t, all.Zero(nil), "all of it is there")
	w.end()
}

// TestClipWaitsForWhoWasLetThrough: a copy that was checked before the buffer
// became shorter is on its stream before Clip waits.
func TestClipWaitsForWhoWasLetThrough(t *testing.T) {
	for _, how := range []string{"Clip", "ClipAfter", "SetAccess"} {
		w := newWorld(t, false)
		b := w.buffer(4, both(w, vmm.ReadWrite)...)
		part, err := b.Slice(2*kib64, 3*kib64)
		require.NoError(t, err)
		checked, submit := make(chan struct{}), make(chan struct{})
		var once sync.Once
		w.m.OnCall(func(call string) {
			if call == "cuMemsetD8Async" {
				once.Do(func() { close(checked); <-submit })
			}
		})
		zeroed := make(chan error, 1)
		go func() { zeroed <- part.Zero(w.far) }()
		<-checked
		took := make(chan error, 1)
		go func() {
			switch how {
			case "SetAccess":
				took <- b.SetAccess(vmm.Access{Location: w.peer.Location()})
				return
			case "Clip":
				check(t, b.Resize(nil, 0))
				took <- b.Clip()
			default:
				check(t, b.Resize(nil, 0))
				took <- b.ClipAfter(w.far)
			}
		}()
		time.Sleep(5 * time.Millisecond)
		w.m.Hold(w.far.Handle())
		close(submit)
		require.NoError(t, <-zeroed)
		time.Sleep(5 * time.Millisecond)
		w.m.Release(w.far.Handle())
		within(t, func() { check(t, <-took) })
		require.NoError(t, w.drain())
		require.NoError(t, w.far.Synchronize(), "%s took the memory from under the copy: %s", how, w.m.Fault())
		w.end()
	}
}

// TestCloseBeginsInTheMiddleOfAnotherChange: what is left to the reclaimer holds
// the buffer, also where Close began before it was.
func TestCloseBeginsInTheMiddleOfAnotherChange(t *testing.T) {
	w := newWorld(t, false)
	b := w.buffer(3, both(w, vmm.ReadWrite)...)
	require.NoError(t, b.Resize(nil, 0))
	require.NoError(t, w.s.Memset(b.Ptr(), 1, 1))
	closing := make(chan error, 1)
	var once sync.Once
	w.m.OnCall(func(call string) {
		if call != "cuEventRecord" {
			return
		}
		once.Do(func() {
			go func() { closing <- b.Close() }()
			for {
				if _, err := b.Slice(0, 0); errors.Is(err, cuda.ErrClosed) {
					return
				}
				time.Sleep(time.Millisecond)
			}
		})
	})
	within(t, func() {
		check(t, b.ClipAfter(w.s))
		check(t, <-closing)
	})
	require.NoError(t, w.drain())
	require.ErrorIs(t, gputest.Err(b.AppendUndefined(1)), cuda.ErrClosed, "a closed buffer stays closed")
	w.end()
}

func TestCloseRacingClipAfter(t *testing.T) {
	for range 30 {
		w := newWorld(t, false)
		b := w.buffer(3, both(w, vmm.ReadWrite)...)
		require.NoError(t, b.Resize(nil, 0))
		crowd(t, 3, func(i int, r *rand.Rand) {
			var err error
			switch i {
			case 0:
				err = b.Close()
			case 1:
				err = b.ClipAfter(w.s)
			default:
				_, err = b.AppendUndefined(kib64)
			}
			assert.True(t, expected(err), "%v", err)
		})
		require.NoError(t, w.drain())
		require.ErrorIs(t, gputest.Err(b.AppendUndefined(1)), cuda.ErrClosed, "a closed buffer stays closed")
		w.end()
	}
}

func TestSetAccessWhileAClipGoes(t *testing.T) {
	for range 30 {
		w := newWorld(t, false)
		b := w.buffer(6)
		require.NoError(t, b.Resize(nil, kib64))
		require.NoError(t, b.ClipAfter(w.s))
		for range 5 {
			require.NoError(t, b.SetAccess(vmm.Access{Location: w.peer.Location(), Mode: vmm.ReadWrite}))
			require.NoError(t, b.SetAccess(vmm.Access{Location: w.peer.Location(), Mode: vmm.NoAccess}))
		}
		w.end()
	}
}

func TestCopiesOfForeignBuffersAreRefused(t *testing.T) {
	w, other := newWorld(t, false), newWorld(t, false)
	a, b := w.buffer(1), other.buffer(1)
	into, err := a.Slice(0, 100)
	require.NoError(t, err)
	from, err := b.Slice(0, 100)
	require.NoError(t, err)
	for _, on := range []*cuda.Stream{nil, w.s} {
		require.ErrorIs(t, into.CopyFromSlice(on, from), cuda.ErrForeign)
		require.ErrorIs(t, gputest.Err(a.AppendSlice(on, from)), cuda.ErrForeign)
	}
	far, err := vmm.NewBuffer(w.peer, vmm.BufferOptions{Reserve: kib64})
	require.NoError(t, err)
	w.own(far)
	require.NoError(t, gputest.Err(far.Append(nil, make([]byte, 100))))
	unseen, err := far.Slice(0, 100)
	require.NoError(t, err)
	require.ErrorIs(t, into.CopyFromSlice(nil, unseen), cuda.ErrNotPermitted, "its device has no access to the source")
	require.ErrorIs(t, gputest.Err(a.AppendSlice(nil, unseen)), cuda.ErrNotPermitted)
	w.end()
	other.end()
}
