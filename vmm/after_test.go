package vmm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// stuck are operations on a buffer that wait for a stream which stands still:
// the device's own, where they name none.
var stuck = []struct {
	name string
	do   func(w *world) error
}{
	{"a download", func(w *world) error { return w.slice.CopyTo(nil, make([]byte, w.slice.Len())) }},
	{"a download on a stream", func(w *world) error { return w.slice.CopyTo(w.s, make([]byte, w.slice.Len())) }},
	{"a long upload", func(w *world) error {
		whole, err := w.b.Slice(0, w.b.Len())
		if err != nil {
			return err
		}
		return whole.CopyFrom(nil, make([]byte, whole.Len()))
	}},
	{"a copy of a slice", func(w *world) error {
		half := w.slice.Len() / 2
		first, err1 := w.slice.Slice(0, half)
		second, err2 := w.slice.Slice(half, 2*half)
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		return first.CopyFromSlice(nil, second)
	}},
	{"a copy to host memory", func(w *world) error { return w.slice.CopyToHost(nil, w.host.All()) }},
	{"Zero", func(w *world) error { return w.slice.Zero(nil) }},
	{"Append", func(w *world) error { _, err := w.b.Append(nil, []byte{1}); return err }},
	{"AppendSlice", func(w *world) error { _, err := w.b.AppendSlice(nil, w.slice); return err }},
	{"Resize", func(w *world) error { return w.b.Resize(nil, w.b.Len()+1) }},
	{"Clip", func(w *world) error { return w.b.Clip() }},
	{"SetAccess", func(w *world) error { return w.b.SetAccess(vmm.Access{Location: w.d.Location(), Mode: vmm.ReadOnly}) }},
}

// large is a buffer of n chunks of a mebibyte.
func (w *world) large(n int, access ...vmm.Access) *vmm.Buffer {
	b, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: 32 * mib, Chunks: vmm.FixedChunks(mib), Access: access})
	require.NoError(w.t, err)
	w.own(b)
	w.b = b
	require.NoError(w.t, b.Resize(nil, n*mib))
	return b
}

// A caller that does not want to wait for the GPU waits for no goroutine that does: the
// calls return while every stream stands still.
func TestFormsWithStreamsWaitForNoGoroutine(t *testing.T) {
	for _, op := range stuck {
		t.Run(op.name, func(t *testing.T) {
			w := newWorld(t, false)
			b := w.large(13, both(w, vmm.ReadWrite)...)
			require.NoError(t, b.Resize(nil, 12*mib))
			w.part(0, 100)
			w.pinned(100)
			transfer, err := w.d.Transfer()
			require.NoError(t, err)
			w.m.Hold(w.s.Handle())
			w.m.Hold(transfer.Handle())
			require.NoError(t, w.s.Memset(b.Ptr()+12*mib+100, 1, 1)) // in the chunk that is clipped
			require.NoError(t, transfer.Memset(b.Ptr()+200, 1, 1))
			waits := make(chan error, 1)
			go func() { waits <- op.do(w) }()
			time.Sleep(5 * time.Millisecond)
			select {
			case err := <-waits:
				t.Fatalf("it was to wait: %v", err)
			default:
			}

			returned := make(chan error, 1)
			go func() {
				for _, do := range []func() error{
					func() error { return b.ClipAfter(w.s) },
					func() error { return b.ClipAfter(w.s, w.far) },
				} {
					if err := do(); err != nil {
						returned <- err
						return
					}
				}
				returned <- nil
			}()
			select {
			case err := <-returned:
				require.NoError(t, err)
			case <-time.After(testTimeout):
				t.Fatal("held up")
			}
			select {
			case err := <-waits:
				t.Fatalf("the streams stood still, and it returned: %v", err)
			default:
			}

			w.m.Release(w.s.Handle())
			w.m.Release(transfer.Handle())
			require.NoError(t, <-waits)
			require.NoError(t, w.drain())
			require.Zero(t, b.Stats().Clipped)
			require.Equal(t, (b.Len()+mib-1)/mib*mib, b.Stats().Committed, "and then it is done")
			require.NoError(t, w.s.Synchronize(), w.m.Fault())
			w.end()
		})
	}
}

// A clip during a change of the buffer follows that change, and fences the copies that
// began after its call.
func TestAClipThatFollowsAChangeFencesLaterCopies(t *testing.T) {
	w := newWorld(t, false)
	b := w.buffer(10)
	transfer, err := w.d.Transfer()
	require.NoError(t, err)
	w.m.Hold(transfer.Handle())
	require.NoError(t, transfer.Memset(b.Ptr(), 1, 1))
	appended, copies := make(chan error, 1), w.m.Count("cuMemcpyHtoDAsync")
	go func() { appended <- gputest.Err(b.Append(nil, pattern(50, 3))) }()
	require.Eventually(t, func() bool { return w.m.Count("cuMemcpyHtoDAsync") > copies }, time.Minute, time.Millisecond, "the change has begun")
	require.NoError(t, b.ClipAfter(w.far))
	// On a stream that the clip does not name, before it is done.
	w.part(5*kib64, kib64)
	w.m.Hold(w.s.Handle())
	require.NoError(t, w.slice.Zero(w.s))
	shrunk := make(chan error, 1)
	go func() { shrunk <- b.Resize(nil, kib64) }()
	w.m.Release(transfer.Handle())
	require.NoError(t, <-appended)
	require.NoError(t, <-shrunk)
	require.NoError(t, b.ClipAfter(w.far, w.s))
	time.Sleep(10 * time.Millisecond)
	w.m.Release(w.s.Handle())
	require.NoError(t, w.drain())
	require.NoError(t, w.s.Synchronize(), w.m.Fault())
	require.Equal(t, kib64, b.Stats().Committed)
	w.end()
}

// A copy in pieces is refused where the buffer loses what it copies meanwhile,
// and never touches what is gone.
func TestALongCopyOfWhatGoesMeanwhile(t *testing.T) {
	for _, up := range []bool{false, true} {
		w := newWorld(t, false)
		b := w.large(16) // more than can be staged
		whole, err := b.Slice(0, b.Len())
		require.NoError(t, err)
		w.m.Hold(w.s.Handle())
		require.NoError(t, w.s.Memset(b.Ptr(), 1, 1))
		copied := make(chan error, 1)
		go func() {
			if up {
				copied <- whole.CopyFrom(w.s, make([]byte, whole.Len()))
			} else {
				copied <- whole.CopyTo(w.s, make([]byte, whole.Len()))
			}
		}()
		time.Sleep(10 * time.Millisecond)
		require.NoError(t, b.Resize(nil, kib64))
		require.NoError(t, b.ClipAfter(w.s))
		w.m.Release(w.s.Handle())
		require.ErrorIs(t, <-copied, cuda.ErrOutOfRange)
		require.NoError(t, w.drain())
		require.NoError(t, w.s.Synchronize(), w.m.Fault())
		require.Equal(t, mib, b.Stats().Committed)
		w.end()
	}
}

// hostBuffer is a buffer of host memory that the CPU reaches.
func hostBuffer(w *world, n int) vmm.Slice[byte] {
	b, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: 32 * mib, Chunks: vmm.FixedChunks(2 * mib),
		Memory: vmm.Properties{Location: cuda.OnHostNUMA(0)}})
	require.NoError(w.t, err)
	w.own(b)
	require.NoError(w.t, gputest.Err(b.Append(nil, pattern(n, 1))))
	w.b = b
	all, err := b.Slice(0, n)
	require.NoError(w.t, err)
	return all
}

// A function that looks at a buffer's memory may use the buffer; what would
// have it wait for itself is an error.
func TestAHostFunctionUsesItsBuffer(t *testing.T) {
	w := newWorld(t, false)
	all := hostBuffer(w, 6*mib)
	b, home := w.b, cuda.OnHostNUMA(0)
	free := w.m.Live()[sim.KindAllocation]
	require.NoError(t, all.Host(func(data []byte) error {
		require.NoError(t, gputest.Err(b.Append(nil, []byte{1, 2, 3})), "growth")
		got := make([]byte, 10)
		part, err := b.Slice(6*mib-7, 6*mib+3)
		require.NoError(t, err)
		require.NoError(t, part.CopyTo(w.s, got), "copies")
		require.Equal(t, append(bytes.Clone(data[6*mib-7:]), 1, 2, 3), got)
		require.NoError(t, all.Host(func(again []byte) error {
			require.Same(t, &data[0], &again[0])
			return nil
		}))
		require.NoError(t, b.Resize(nil, 100))
		require.ErrorIs(t, b.Clip(), cuda.ErrInUse)
		require.ErrorContains(t, b.Clip(), "a Host function uses 6 MiB of the memory")
		require.ErrorIs(t, b.Close(), cuda.ErrInUse)
		require.ErrorIs(t, b.SetAccess(vmm.Access{Location: home, Mode: vmm.NoAccess}), cuda.ErrInUse)
		require.NoError(t, b.SetAccess(vmm.Access{Location: w.d.Location(), Mode: vmm.ReadOnly}), "the CPU keeps its access")
		require.NoError(t, b.SetAccess(vmm.Access{Location: w.d.Location(), Mode: vmm.ReadWrite}))
		require.NoError(t, b.ClipAfter(w.s), "at once, and given back later")
		time.Sleep(20 * time.Millisecond)
		require.Equal(t, free+1, w.m.Live()[sim.KindAllocation])
		data[5*mib] = 9 // it is still there
		require.ErrorIs(t, all.Host(func([]byte) error { return nil }), cuda.ErrOutOfRange)
		return nil
	}))
	require.NoError(t, w.drain())
	require.Equal(t, 2*mib, b.Stats().Committed)
	require.NoError(t, b.SetAccess(vmm.Access{Location: home, Mode: vmm.NoAccess}))
	part, err := b.Slice(0, 100)
	require.NoError(t, err)
	require.ErrorIs(t, part.Host(func([]byte) error { return nil }), cuda.ErrNotPermitted)
	require.NoError(t, b.Close())
	w.end()
}

// What takes memory away is refused while a function of any goroutine looks at it.
func TestWhatTakesMemoryAwayIsRefusedBesideHostFunctions(t *testing.T) {
	for name, take := range map[string]func(b *vmm.Buffer) error{
		"Clip":      func(b *vmm.Buffer) error { return b.Clip() },
		"Close":     func(b *vmm.Buffer) error { return b.Close() },
		"SetAccess": func(b *vmm.Buffer) error { return b.SetAccess(vmm.Access{Location: cuda.OnHostNUMA(0)}) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, false)
			all := hostBuffer(w, 6*mib)
			require.NoError(t, all.Host(func(data []byte) error {
				require.NoError(t, w.b.Resize(nil, 100))
				taken := make(chan error, 1)
				go func() { taken <- take(w.b) }()
				require.ErrorIs(t, <-taken, cuda.ErrInUse)
				require.NoError(t, gputest.Err(w.b.Append(nil, make([]byte, 5*mib))), "it stays as it is")
				require.NoError(t, w.b.Resize(nil, 100))
				data[6*mib-1] = 1
				return nil
			}))
			require.NoError(t, take(w.b))
			w.end()
		})
	}
}

// A function that looks and one that closes begin at the same time: one of the two is
// refused, and neither waits for the other.
func TestAHostFunctionBesideAClose(t *testing.T) {
	for range 300 {
		w := newWorld(t, false)
		all := hostBuffer(w, mib)
		looked, closed := make(chan error, 1), make(chan error, 1)
		go func() { closed <- w.b.Close() }()
		var refused error
		go func() {
			looked <- all.Host(func(data []byte) error {
				data[0] = 1
				refused = <-closed
				return nil
			})
		}()
		if err := <-looked; err != nil {
			require.ErrorIs(t, err, cuda.ErrClosed)
			require.NoError(t, <-closed)
		} else {
			require.ErrorIs(t, refused, cuda.ErrInUse)
		}
		require.NoError(t, w.b.Close())
		w.end()
	}
}

// An append that fails gives back what it took from a clip that waits for a function,
// but not under the function.
func TestAFailedAppendLeavesClippedMemoryToItsHostFunction(t *testing.T) {
	for name, n := range map[string]int{"all of it taken back": 5 * mib, "a part taken back": mib, "more made behind it": 7 * mib} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, false)
			all := hostBuffer(w, 6*mib)
			before := w.m.Live()[sim.KindAllocation]
			require.NoError(t, all.Host(func(data []byte) error {
				require.NoError(t, w.b.Resize(nil, 2*mib))
				require.NoError(t, w.b.ClipAfter(w.s))
				w.m.Inject(sim.Fault{Call: "cuMemcpyHtoDAsync", Times: 1, Result: cuda.Code(driver.Unknown)})
				unmapped := w.m.Count("cuMemUnmap")
				require.Error(t, gputest.Err(w.b.Append(nil, make([]byte, n))))
				require.Equal(t, unmapped, w.m.Count("cuMemUnmap"), "the function uses it")
				data[6*mib-1] = 1
				return nil
			}))
			require.NoError(t, w.drain())
			require.Equal(t, before-2, w.m.Live()[sim.KindAllocation])
			require.Equal(t, 2*mib, w.b.Stats().Committed)
			require.Zero(t, w.b.Stats().Clipped)
			w.end()
		})
	}
}

func TestAMappingsHostFunction(t *testing.T) {
	w := newWorld(t, false)
	require.NoError(t, w.create(2*mib, vmm.Properties{Location: cuda.OnHostNUMA(0)}))
	r, err := vmm.Reserve(w.d, 2*mib, vmm.ReserveOptions{Align: 2 * mib})
	require.NoError(t, err)
	w.own(r)
	m, err := r.Map(0, w.a)
	require.NoError(t, err)
	w.own(m)
	home := cuda.OnHostNUMA(0)
	grant, revoke := vmm.Access{Location: home, Mode: vmm.ReadWrite}, vmm.Access{Location: home}
	require.NoError(t, m.SetAccess(grant, vmm.Access{Location: w.d.Location(), Mode: vmm.ReadWrite}))
	require.NoError(t, m.Host(func(data []byte) error {
		require.ErrorIs(t, m.Close(), cuda.ErrInUse)
		require.ErrorIs(t, m.SetAccess(revoke), cuda.ErrInUse)
		require.ErrorIs(t, r.SetAccess(0, 2*mib, revoke), cuda.ErrInUse)
		require.NoError(t, m.SetAccess(grant))
		data[0] = 1
		return nil
	}))
	require.NoError(t, r.SetAccess(0, 2*mib, revoke))
	require.ErrorIs(t, m.Host(func([]byte) error { return nil }), cuda.ErrNotPermitted)
	w.end()
}

// taking are the forms with streams that take memory or access from the world's
// buffer, and from its peer device.
var taking = map[string]func(w *world) error{
	"ClipAfter": func(w *world) error { return errors.Join(w.b.Resize(nil, kib64), w.b.ClipAfter(w.s)) },
	"Shrink": func(w *world) error {
		h, err := share.Of(w.b).Hold(testOp, "a test", uint64(w.b.Len()))
		require.NoError(w.t, err)
		defer h.Release()
		gone, err := share.Shrink(testOp, h, kib64, []*cuda.Stream{w.s})
		return errors.Join(err, gone.Release())
	},
	"CloseAfter": func(w *world) error { return w.b.CloseAfter(w.s) },
}

// midway starts a copy of more than can be staged, on a stream that stands still.
// When it returns, all that can be staged is on the stream, and the copy waits for
// room.
func (w *world) midway(run func() error) <-chan error {
	copied := make(chan error, 1)
	waits, once := make(chan struct{}), sync.Once{}
	w.m.OnCall(func(call string) {
		if call == "cuEventSynchronize" {
			once.Do(func() { close(waits) })
		}
	})
	go func() { copied <- run() }()
	w.before(copied, waits)
	return copied
}

// before waits for something that comes before an operation has ended.
func (w *world) before(ended <-chan error, come <-chan struct{}) {
	select {
	case <-come:
	case err := <-ended:
		require.Fail(w.t, "it was to wait", "it returned: %v", err)
	}
}

// stillWaits sees that what was taken is not given back yet.
func (w *world) stillWaits() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	require.ErrorIs(w.t, w.sys.Drain(ctx), context.DeadlineExceeded, "the copy's pieces have not passed")
}

// A copy that runs when memory or access goes by the forms with streams is
// fenced on its own stream too, which no call may have named: the caller of a
// copy that waits has no reason to.
func TestTheFormsWithStreamsMindCopiesThatRun(t *testing.T) {
	for name, take := range taking {
		for _, up := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s up=%v", name, up), func(t *testing.T) {
				w := newWorld(t, false)
				b := w.large(16, both(w, vmm.ReadWrite)...) // more than can be staged
				whole, err := b.Slice(0, b.Len())
				require.NoError(t, err)
				w.m.Hold(w.far.Handle())
				copied := w.midway(func() error {
					if up {
						return whole.CopyFrom(w.far, make([]byte, whole.Len()))
					}
					return whole.CopyTo(w.far, make([]byte, whole.Len()))
				})
				require.NoError(t, take(w))
				w.stillWaits()
				w.m.Release(w.far.Handle())
				<-copied
				require.NoError(t, w.drain())
				require.NoError(t, w.far.Synchronize(), w.m.Fault())
				w.end()
			})
		}
	}
}

// So is one that is refused what goes, and has returned before its stream is
// looked for; but not by later calls.
func TestTheFormsWithStreamsMindCopiesThatTheyEnd(t *testing.T) {
	for name, take := range taking {
		if name == "CloseAfter" { // refuses no piece of a copy that runs
			continue
		}
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, false)
			b := w.large(2, both(w, vmm.ReadWrite)...)
			whole, err := b.Slice(0, b.Len())
			require.NoError(t, err)
			w.m.Hold(w.far.Handle())
			var slots atomic.Int32
			var refused atomic.Bool
			between, goOn, copied := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			w.m.OnCall(func(call string) {
				switch {
				case call == "cuMemHostAlloc" && slots.Add(1) == 2: // one piece is on the stream
					close(between)
					<-goOn
				case call == "cuEventRecord" && refused.CompareAndSwap(true, false): // for the fence
					close(goOn)
					select {
					case err := <-copied:
						require.Error(t, err)
					case <-time.After(testTimeout):
						require.Fail(t, "the copy was to be refused first")
					}
					// Another call comes and goes meanwhile.
					require.Error(t, b.ClipAfter(), "without a stream")
				}
			})
			go func() { copied <- whole.CopyFrom(w.far, make([]byte, whole.Len())) }()
			<-between
			refused.Store(true)
			require.NoError(t, take(w))
			w.stillWaits()

			w.m.Release(w.far.Handle())
			require.NoError(t, w.drain())
			require.NoError(t, w.far.Synchronize(), w.m.Fault())
			w.end()
		})
	}
}

// During a copy, a clip or a revocation waits for the streams that it names and for the
// copy's, and for no others: those may be blocked for any length of time.
func TestTheFormsWithStreamsWaitForNoOthersBesideCopies(t *testing.T) {
	for name, take := range taking {
		if name == "CloseAfter" { // waits for all streams: the copy may be on any of them
			continue
		}
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, false)
			b := w.large(16, both(w, vmm.ReadWrite)...) // more than can be staged
			whole, err := b.Slice(0, b.Len())
			require.NoError(t, err)
			other, err := w.d.NewStream(cuda.StreamOptions{})
			require.NoError(t, err)
			w.own(other)
			block, err := vmm.NewBuffer(w.d, vmm.BufferOptions{Reserve: mib})
			require.NoError(t, err)
			w.own(block)
			require.NoError(t, block.Resize(nil, 1))
			w.m.Hold(other.Handle())
			require.NoError(t, other.Memset(block.Ptr(), 1, 1))
			w.m.Hold(w.far.Handle())
			copied := w.midway(func() error { return whole.CopyTo(w.far, make([]byte, whole.Len())) })
			require.NoError(t, take(w))
			w.m.Release(w.far.Handle())
			<-copied
			require.NoError(t, w.drain())
			w.m.Release(other.Handle())
			w.end()
		})
	}
}

// A copy that waits has waited for all of its pieces even if the rest is refused: an
// operation that then shortens the buffer knows of no stream that still reads it.
func TestACopyThatIsRefusedHalfwayHasWaited(t *testing.T) {
	for name, run := range map[string]func(w *world, whole vmm.Slice[byte]) error{
		"down": func(w *world, whole vmm.Slice[byte]) error { return whole.CopyTo(w.s, make([]byte, whole.Len())) },
		"up":   func(_ *world, whole vmm.Slice[byte]) error { return whole.CopyFrom(nil, make([]byte, whole.Len())) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, false)
			b := w.large(2) // so few that nothing waits for room
			whole, err := b.Slice(0, b.Len())
			require.NoError(t, err)
			on := w.s
			if name == "up" {
				on, err = w.d.Transfer()
				require.NoError(t, err)
			}
			w.m.Hold(on.Handle())
			waits := make(chan struct{})
			var shortened, waited sync.Once
			w.m.OnCall(func(call string) {
				switch call {
				case "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync": // the first piece
					shortened.Do(func() {
						done := make(chan error)
						go func() { done <- b.Resize(nil, kib64) }() // beside the copy
						require.NoError(t, <-done)
					})
				case "cuEventSynchronize":
					waited.Do(func() { close(waits) })
				}
			})
			copied := make(chan error, 1)
			go func() { copied <- run(w, whole) }()
			w.before(copied, waits)
			w.m.Release(on.Handle())
			require.ErrorIs(t, <-copied, cuda.ErrOutOfRange)
			require.NoError(t, b.ClipAfter(w.s))
			require.NoError(t, w.drain())
			w.end()
		})
	}
}
