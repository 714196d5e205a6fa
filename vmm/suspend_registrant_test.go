package vmm_test

import (
	"context"
	"errors"
	"runtime"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// Who registered addresses elsewhere is called while the memory is still there, and when it is there
// again; when it refuses, and whatever fails afterwards, all is as before.
func TestRegistrantsAreCalledBeforeAndAfter(t *testing.T) {
	w := newWorld(t, false)
	defer w.end()
	a, b := w.buffer(2), w.buffer(1)
	want := [2][]byte{w.bytes(a), w.bytes(b)}
	var calls []string
	refusal := map[string]func() error{}
	register := func(name string, b *vmm.Buffer) (remove func()) {
		remove, err := vmm.OnSuspend(b, func(ctx context.Context) error {
			require.NoError(t, ctx.Err())
			require.ErrorIs(t, gputest.Err(b.Append(nil, []byte{1})), cuda.ErrSuspended)
			_, err := w.m.Bytes(b.Ptr(), 1)
			require.NoError(t, err, "the memory is there")
			if f := refusal[name]; f != nil {
				if err := f(); err != nil {
					return err
				}
			}
			calls = append(calls, "leave "+name)
			return nil
		}, func() {
			require.NoError(t, b.Grow(0), "it can be used")
			calls = append(calls, "back "+name)
		})
		require.NoError(t, err)
		return remove
	}
	remove := register("a", a)
	register("b", b)
	register("b2", b)
	called := func(want ...string) {
		t.Helper()
		require.Equal(t, want, calls)
		calls = nil
	}

	s := w.suspend(a, b)
	called("leave a", "leave b", "leave b2")
	w.m.Inject(sim.Fault{Call: "cuMemMap", Result: code})
	require.Error(t, s.Resume(w.ctx()))
	called()
	require.NoError(t, s.Resume(w.ctx(), b))
	called("back b", "back b2")
	require.NoError(t, s.Resume(w.ctx()))
	called("back a")

	boom := errors.New("in a collective")
	for text, f := range map[string]func() error{"in a collective": func() error { return boom }, "panicked: no": func() error { panic("no") },
		"Goexit": func() error { runtime.Goexit(); return nil }} {
		refusal["b2"] = f
		_, err := vmm.Suspend(w.ctx(), vmm.SuspendOptions{Keep: vmm.Drop}, a, b)
		require.ErrorContains(t, err, text)
		require.ErrorContains(t, err, "vmm.OnSuspend: ")
		require.ErrorContains(t, err, b.Ptr().String())
		require.ErrorContains(t, err, "suspend again when that function permits it")
		require.NotContains(t, err.Error(), "goroutine 1", "a stack, of which a publisher would be told")
		require.Equal(t, text == "in a collective", errors.Is(err, boom))
		called("leave a", "leave b", "back a", "back b")
	}
	refusal["b2"] = nil
	w.m.Inject(sim.Fault{Call: "cuMemcpyDtoHAsync", Result: code})
	_, err := vmm.Suspend(w.ctx(), vmm.SuspendOptions{}, b)
	require.ErrorContains(t, err, "cuMemcpyDtoHAsync")
	called("leave b", "leave b2", "back b", "back b2")

	s, err = vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{w.s}, a)
	require.NoError(t, err)
	require.NoError(t, s.Released().Wait(w.ctx()))
	remove()
	require.NoError(t, s.Resume(w.ctx()))
	called("leave a", "back a")
	require.NoError(t, w.suspend(a).Resume(w.ctx()))
	called()
	require.Equal(t, want, [2][]byte{w.bytes(a), w.bytes(b)})

	for _, c := range []struct {
		m     vmm.Memory
		leave func(context.Context) error
		back  func()
	}{{nil, func(context.Context) error { return nil }, func() {}}, {a, nil, func() {}}, {a, func(context.Context) error { return nil }, nil}} {
		_, err := vmm.OnSuspend(c.m, c.leave, c.back)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	gone := w.buffer(1)
	require.NoError(t, gone.Close())
	_, err = vmm.OnSuspend(gone, func(context.Context) error { return nil }, func() {})
	require.ErrorIs(t, err, cuda.ErrClosed)
}
