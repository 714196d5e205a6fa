package vmm_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// An operation that names no stream runs on the device's own. If another library
// captures that, the operation is refused before anything of it is in the graph,
// which would run it again at each launch.
func TestNothingOfARefusedOperationIsInACapture(t *testing.T) {
	m, d := open(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 16 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	closed(t, b)
	want := pattern(3*mib, 1)
	require.NoError(t, gputest.Err(b.Append(nil, want)))
	part, err := b.Slice(0, 100)
	require.NoError(t, err)
	h, err := d.NewHostBuffer(100)
	require.NoError(t, err)
	closed(t, h)
	own, err := d.Transfer()
	require.NoError(t, err)
	in, drv := core.StreamOf(own), core.SystemOf(d.System()).Drv
	own.Handle() // which lets others capture the stream
	require.Equal(t, driver.Success, drv.StreamBeginCapture(in.Ctx.Handle, in.Handle, driver.CaptureRelaxed))
	before := b.Stats()
	for name, do := range map[string]func() error{
		"Append":        func() error { return gputest.Err(b.Append(nil, want)) },
		"AppendHost":    func() error { return gputest.Err(b.AppendHost(nil, h.All())) },
		"AppendSlice":   func() error { return gputest.Err(b.AppendSlice(nil, part)) },
		"AppendPtr":     func() error { return gputest.Err(b.AppendPtr(nil, b.Ptr(), 100)) },
		"Resize":        func() error { return b.Resize(nil, 8*mib) },
		"Fork":          func() error { return gputest.Err(b.Fork(nil, b.Len(), vmm.ForkOptions{})) },
		"CopyFrom":      func() error { return part.CopyFrom(nil, make([]byte, 100)) },
		"CopyTo":        func() error { return part.CopyTo(nil, make([]byte, 100)) },
		"CopyFromHost":  func() error { return part.CopyFromHost(nil, h.All()) },
		"CopyToHost":    func() error { return part.CopyToHost(nil, h.All()) },
		"CopyFromSlice": func() error { return part.CopyFromSlice(nil, part) },
		"Zero":          func() error { return part.Zero(nil) },
	} {
		submitted := m.Count("cuMemcpyHtoDAsync") + m.Count("cuMemcpyDtoHAsync") + m.Count("cuMemcpyDtoDAsync") + m.Count("cuMemsetD8Async")
		require.ErrorIs(t, do(), cuda.ErrCapturing, name)
		require.Equal(t, submitted, m.Count("cuMemcpyHtoDAsync")+m.Count("cuMemcpyDtoHAsync")+m.Count("cuMemcpyDtoDAsync")+m.Count("cuMemsetD8Async"), name)
		require.Equal(t, before, b.Stats(), name)
	}
	g, r := drv.StreamEndCapture(in.Ctx.Handle, in.Handle)
	require.Equal(t, driver.Success, r, "the capture is whole")
	require.Equal(t, driver.Success, drv.GraphDestroy(g))
	require.Equal(t, want, bytesOf(t, b))
}
