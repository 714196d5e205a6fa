package sim

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// remap maps other memory where a chunk is mapped, and returns the handles of both.
func (r *rig) remap(p driver.Ptr) (old, now driver.MemHandle) {
	r.t.Helper()
	old, res := r.MemRetainAllocationHandle(p)
	r.ok(res)
	now = r.create(chunk, on(0, 0))
	r.t.Cleanup(func() {
		r.ok(r.MemRelease(old))
		r.ok(r.MemRelease(now))
	})
	r.ok(r.MemUnmap(p, chunk))
	r.ok(r.MemMap(p, chunk, 0, now))
	r.allow(p, chunk, 0)
	return old, now
}

func (r *rig) launchOne(c driver.Context, name string, s driver.Stream, p driver.Ptr) {
	r.t.Helper()
	r.ok(r.LaunchKernel(c, r.function(c, name), one, binary.NativeEndian.AppendUint64(nil, uint64(p)), s))
}

func mapping(p driver.Ptr) string {
	return fmt.Sprintf("the mapping [%#x, %#x) was unmapped", p, p+chunk)
}

// A call that is refused says in the log which page it missed, and why.
func TestARefusedCopyNamesThePage(t *testing.T) {
	r := start(t, Options{})
	p, s, good, host := r.mapped(3), r.stream(driver.StreamNonBlocking), r.mapped(3), r.pinned(64)
	middle := p + chunk
	r.ok(r.MemUnmap(middle, chunk))
	calls := map[string]func() driver.Result{
		"cuMemsetD8Async":      func() driver.Result { return r.MemsetD8Async(r.ctx, p, 1, 3*chunk, s) },
		"cuMemsetD32Async":     func() driver.Result { return r.MemsetD32Async(r.ctx, p, 1, 3*chunk/4, s) },
		"cuMemcpyHtoDAsync":    func() driver.Result { return r.MemcpyHtoDAsync(r.ctx, middle-32, pointer(host), 64, s) },
		"cuMemcpyDtoHAsync":    func() driver.Result { return r.MemcpyDtoHAsync(r.ctx, pointer(host), middle-32, 64, s) },
		"cuMemcpyDtoDAsync":    func() driver.Result { return r.MemcpyDtoDAsync(r.ctx, good, p, 3*chunk, s) },
		"cuMemcpyDtoD":         func() driver.Result { return r.MemcpyDtoD(r.ctx, p, good, 3*chunk) },
		"cuStreamWriteValue64": func() driver.Result { return r.StreamWriteValue64(r.ctx, s, middle, 1) },
		"cuStreamWaitValue64":  func() driver.Result { return r.StreamWaitValue64(r.ctx, s, middle, 1) },
	}
	for name, call := range calls {
		before := len(r.m.Log())
		r.is(driver.InvalidValue, call())
		log := strings.Join(r.m.Log()[before:], "\n")
		require.Contains(t, log, name)
		require.Contains(t, log, fmt.Sprintf("illegal address %#x", middle), name)
		require.Contains(t, log, mapping(middle)+" before this work was submitted", name)
	}
	require.Empty(t, r.m.Fault())
	never := r.reserve(chunk)
	r.is(driver.InvalidValue, r.MemsetD8Async(r.ctx, never, 1, 8, s))
	require.Contains(t, strings.Join(r.m.Log(), "\n"), fmt.Sprintf("the reservation [%#x, %#x), and nothing was", never, never+chunk))
	r.ok(r.MemAddressFree(never, chunk))
}

// Work that is submitted names the page when it comes to it.
func TestWorkOnUnmappedMemoryNamesThePage(t *testing.T) {
	for name, submit := range map[string]func(r *rig, c driver.Context, s driver.Stream, middle driver.Ptr){
		"a kernel, before": func(r *rig, c driver.Context, s driver.Stream, middle driver.Ptr) {
			r.ok(r.MemUnmap(middle, chunk))
			r.launchOne(c, "sim_test_gate", s, middle+8)
		},
		"a kernel, after": func(r *rig, c driver.Context, s driver.Stream, middle driver.Ptr) {
			r.launchOne(c, "sim_test_gate", s, middle+8)
			r.ok(r.MemUnmap(middle, chunk))
		},
		"a memset across it, after": func(r *rig, c driver.Context, s driver.Stream, middle driver.Ptr) {
			r.ok(r.MemsetD8Async(c, middle-chunk, 1, 3*chunk, s))
			r.ok(r.MemUnmap(middle, chunk))
		},
		"a copy of it, after": func(r *rig, c driver.Context, s driver.Stream, middle driver.Ptr) {
			r.ok(r.MemcpyDtoDAsync(c, middle-chunk, middle, chunk, s))
			r.ok(r.MemUnmap(middle, chunk))
		},
		"a write of a word, after": func(r *rig, c driver.Context, s driver.Stream, middle driver.Ptr) {
			r.ok(r.StreamWriteValue64(c, s, middle, 1))
			r.ok(r.MemUnmap(middle, chunk))
		},
		"a memset and a later mapping, after": func(r *rig, c driver.Context, s driver.Stream, middle driver.Ptr) {
			r.ok(r.MemsetD8Async(c, middle-8, 1, 16, s))
			r.remap(middle)
		},
		"a copy and a later mapping, after": func(r *rig, c driver.Context, s driver.Stream, middle driver.Ptr) {
			r.ok(r.MemcpyDtoDAsync(c, middle-chunk, middle, chunk, s))
			r.remap(middle)
		},
	} {
		t.Run(name, func(t *testing.T) {
			var middle driver.Ptr
			faulty(t, driver.IllegalAddress, "[", func(r *rig, c driver.Context, s driver.Stream) {
				middle = r.mapped(3) + chunk
				r.m.Hold(uintptr(s))
				submit(r, c, s, middle)
				r.m.Release(uintptr(s))
				r.is(driver.IllegalAddress, r.StreamSynchronize(c, s))
				_, when, _ := strings.Cut(name, ", ")
				require.Contains(t, r.m.Fault(), mapping(middle)+" "+when+" this work was submitted")
			})
		})
	}
}

// A graph means what is mapped when it is launched, and a launch that is in flight keeps
// what was mapped then.
func TestGraphsAndLaterMappings(t *testing.T) {
	r := start(t, Options{})
	p, s := r.mapped(1), r.stream(driver.StreamNonBlocking)
	r.begin(s)
	r.ok(r.MemsetD8Async(r.ctx, p, 1, 8, s))
	e := r.end(s)
	old, _ := r.remap(p)
	r.ok(r.GraphLaunch(r.ctx, e, s))
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.Equal(t, repeated(1, 8), r.bytes(p, 8))
	r.ok(r.MemUnmap(p, chunk))
	r.ok(r.MemMap(p, chunk, 0, old))
	r.allow(p, chunk, 0)
	require.Equal(t, repeated(0, 8), r.bytes(p, 8))

	faulty(t, driver.LaunchFailed, "and what is mapped there now came later", func(r *rig, c driver.Context, s driver.Stream) {
		p := r.mapped(1)
		r.ok(r.lib.StreamBeginCapture(c, s, driver.CaptureRelaxed))
		r.ok(r.MemsetD8Async(c, p, 1, 8, s))
		g, res := r.lib.StreamEndCapture(c, s)
		r.ok(res)
		e, res := r.lib.GraphInstantiate(c, g)
		r.ok(res)
		r.m.Hold(uintptr(s))
		r.ok(r.GraphLaunch(c, e, s))
		r.remap(p)
		r.m.Release(uintptr(s))
		r.is(driver.LaunchFailed, r.StreamSynchronize(c, s))
		r.ok(r.lib.GraphDestroy(g))
		r.ok(r.lib.GraphExecDestroy(e))
	})
}

// A kernel may be told of new memory while it runs: what it finds is what is mapped then.
func TestAKernelFindsLaterMappings(t *testing.T) {
	r := start(t, Options{})
	p, s := r.mapped(1), r.stream(driver.StreamNonBlocking)
	r.m.Hold(uintptr(s))
	r.launchOne(r.ctx, "sim_test_gate", s, p)
	r.remap(p)
	require.NoError(t, r.m.Poke(cuda.Ptr(p), []byte{7}))
	r.m.Release(uintptr(s))
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.Equal(t, []byte{8}, r.bytes(p, 1))
}

// What was mapped in a reservation that is gone does not matter to the next one there, and
// parts of a mapping that was replaced by smaller ones are still known.
func TestFormerMappings(t *testing.T) {
	r := start(t, Options{ReuseAddresses: true})
	p := r.reserve(3 * chunk)
	big, small := r.create(3*chunk, on(0, 0)), r.create(chunk, on(0, 0))
	r.ok(r.MemMap(p, 3*chunk, 0, big))
	r.ok(r.MemUnmap(p, 3*chunk))
	r.ok(r.MemMap(p+chunk, chunk, 0, small))
	r.ok(r.MemUnmap(p+chunk, chunk))
	why := func(at driver.Ptr) string { return r.m.whatIsAt(uint64(at), created.Add(1)) }
	whole := fmt.Sprintf("the mapping [%#x, %#x) was unmapped before", p, p+3*chunk)
	require.Contains(t, why(p), whole)
	require.Contains(t, why(p+chunk), mapping(p+chunk)+" before")
	require.Contains(t, why(p+2*chunk), whole)
	r.ok(r.MemAddressFree(p, 3*chunk))
	require.Equal(t, p, r.reserve(3*chunk))
	require.Contains(t, why(p+chunk), "and nothing was")
	r.ok(r.MemAddressFree(p, 3*chunk))
	r.ok(r.MemRelease(big))
	r.ok(r.MemRelease(small))
}
