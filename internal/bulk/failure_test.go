package bulk_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// walked is what the failure walks strike: every operation, with device memory that holds want
// unless an operation that writes it has failed.
func walked(t *testing.T, g gpu, size int) map[string]func() error {
	p := g.memory(t, size)
	want := random(size, 5)
	g.write(t, p, want)
	all := []bulk.Segment{{Ptr: p, Bytes: uint64(size)}}
	behind := o
	behind.After = []*core.Stream{core.StreamOf(g.stream)}
	backed := func(ahead bool) func() error {
		return func() error {
			b, err := g.Reserve(t.Context(), uint64(size), ahead, o)
			if err != nil {
				return err
			}
			defer b.Release()
			if err := b.Out(t.Context(), all, 0, behind); err != nil {
				return err
			}
			return b.In(t.Context(), all, 0, o)
		}
	}
	const small = 200
	var apart []bulk.Segment
	for i := range small {
		apart = append(apart, bulk.Segment{Ptr: p + driver.Ptr(1500*i), Bytes: 1500})
	}
	rand.New(rand.NewPCG(1, 1)).Shuffle(small, func(i, j int) { apart[i], apart[j] = apart[j], apart[i] })
	return map[string]func() error{
		"scattered": func() error {
			return g.Fill(t.Context(), apart, func(_ context.Context, buf []byte, offset uint64, n int) (int, error) {
				for i := range n {
					s := apart[(int(offset)+i)/1500]
					buf[i] = want[int(s.Ptr-p)+(int(offset)+i)%1500]
				}
				return 0, nil
			}, behind)
		},
		"apart": func() error {
			b, err := g.Reserve(t.Context(), 1500*small, true, o)
			if err != nil {
				return err
			}
			defer b.Release()
			if err := b.Out(t.Context(), apart, 0, behind); err != nil {
				return err
			}
			return b.In(t.Context(), apart, 0, o)
		},
		"ahead":     backed(true),
		"pipelined": backed(false),
		"fill": func() error {
			return g.Fill(t.Context(), all, func(_ context.Context, buf []byte, offset uint64, n int) (int, error) {
				copy(buf, want[offset:][:n])
				return 0, nil
			}, behind)
		},
		"drain": func() error {
			return g.Drain(t.Context(), all, func(_ context.Context, piece []byte, offset uint64) error {
				if string(piece) != string(want[offset:][:len(piece)]) {
					return fmt.Errorf("the bytes at %d differ", offset)
				}
				return nil
			}, o)
		},
	}
}

// Every driver call of every operation fails, the giving back too. The code is kept, the same
// operation succeeds afterwards, and nothing is left.
func TestEveryFailureLeavesNothing(t *testing.T) {
	for _, name := range []string{"ahead", "pipelined", "fill", "drain", "scattered"} {
		t.Run(name, func(t *testing.T) {
			m, sys := sim.Open(t)
			g := on(t, sys.Devices()[0])
			operations := walked(t, g, slab+3*mib)
			run := operations[name]
			require.NoError(t, run())
			for _, fresh := range []bool{false, true} {
				struck := map[string]bool{}
				for after := 0; ; after++ {
					if fresh {
						sys.TrimHost()
						require.Zero(t, m.Live()[sim.KindRegistration])
					}
					var calls atomic.Int64
					m.OnCall(func(string) { calls.Add(1) })
					before := m.Counts()
					remove := m.Inject(sim.Fault{After: after, Result: 999})
					err := run()
					remove()
					m.OnCall(nil)
					if calls.Load() <= int64(after) {
						require.NoError(t, err)
						break
					}
					for call, n := range m.Counts() {
						if n > before[call] {
							struck[call] = true
						}
					}
					if err != nil {
						var e *cuda.Error
						require.ErrorAs(t, err, &e)
						require.Equal(t, cuda.Code(999), e.Code)
					}
					require.NoError(t, sys.Drain(context.Background()), "call %d", after)
					require.NoError(t, run(), "call %d: %v", after, err)
				}
				require.True(t, struck["cuEventRecord"] && struck["cuEventQuery"], "%v", struck)
				require.Equal(t, fresh, struck["cuMemHostRegister"])
			}
			require.Zero(t, bulk.Promised())
		})
	}
}

// The driver takes none of what is given back. It stays retained, and goes later.
func TestMemoryThatTheDriverDoesNotUnpinStaysRetained(t *testing.T) {
	m, sys := sim.Open(t)
	g := on(t, sys.Devices()[0])
	operations := walked(t, g, slab+3*mib)
	g.Retain(0)
	remove := m.Inject(sim.Fault{Call: "cuMemHostUnregister", Times: -1, Result: 999})
	require.NoError(t, operations["ahead"]())
	retained := g.Retained()
	require.NotZero(t, retained)
	require.Zero(t, sys.TrimHost())
	require.NoError(t, operations["ahead"]())
	require.Equal(t, retained, g.Retained(), "it is used again")
	remove()
	require.NoError(t, operations["fill"]())
	require.Zero(t, g.Retained())
}

// The context is lost at every driver call. The operation says so, and nothing is left when the
// System closes; the memory that the lost context may use is not used again.
func TestALossAtEveryCall(t *testing.T) {
	for _, name := range []string{"ahead", "pipelined", "fill", "drain", "scattered"} {
		t.Run(name, func(t *testing.T) {
			for after := 0; ; after++ {
				if after > 12 {
					after += after / 2 // later calls are alike
				}
				m, sys := sim.Open(t)
				g := on(t, sys.Devices()[0])
				operations := walked(t, g, 5*mib)
				run := operations[name]
				var calls atomic.Int64
				m.OnCall(func(string) { calls.Add(1) })
				m.Inject(sim.Fault{After: after, Result: 700})
				err := run()
				m.OnCall(nil)
				m.ClearFaults()
				if calls.Load() <= int64(after) {
					require.NoError(t, err)
					return
				}
				if err == nil {
					continue // a call that names no context, or one behind the last copy
				}
				require.ErrorIs(t, err, cuda.ErrDeviceLost)
				require.Zero(t, bulk.Promised())
				require.Zero(t, g.Retained(), "no wait told that the lost context does not use it")
				require.Error(t, run())
				require.NoError(t, sys.Drain(context.Background()))
			}
		})
	}
}

// Operations of several goroutines on several devices run beside each other.
func TestOperationsBesideEachOther(t *testing.T) {
	_, sys := sim.Open(t, sim.Options{Devices: make([]sim.DeviceOptions, 2)})
	var g errgroup.Group
	for _, d := range sys.Devices() {
		for _, name := range []string{"fill", "drain", "ahead", "scattered"} { // each with memory of its own
			g.Go(walked(t, on(t, d), slab+3*mib)[name])
		}
	}
	require.NoError(t, g.Wait())
	require.NoError(t, sys.Drain(t.Context()))
	require.Zero(t, bulk.Promised())
}
