package sim

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// What cmd/libcuda needs besides. Its own tests have C programs make these calls.

// A kernel reaches what another device's context allocated once that is a peer, and no longer
// when it is not.
func TestKernelsReachThePeersMemory(t *testing.T) {
	faulty(t, driver.IllegalAddress, "a kernel of device 0 reaches it only with peer access", func(r *rig, c driver.Context, s driver.Stream) {
		peer, res := r.CtxCreate(0, 1)
		r.ok(res)
		p, res := r.MemAlloc(peer, 64)
		r.ok(res)
		r.t.Cleanup(func() {
			r.ok(r.MemFree(peer, p))
			r.ok(r.CtxDestroy(peer))
		})
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		r.ok(r.CtxSetCurrent(c))
		defer func() { r.ok(r.CtxSetCurrent(0)) }()
		hosted := r.lib.(driver.Hosted)
		launch := func() {
			r.ok(r.LaunchKernel(c, r.function(c, "sim_test_scale"), one, scaleParams(p, 16, floatTwo), s))
		}
		r.is(driver.PeerNotEnabled, hosted.SetPeerAccess(peer, false))
		r.ok(hosted.SetPeerAccess(peer, true))
		r.is(driver.PeerEnabled, hosted.SetPeerAccess(peer, true))
		launch()
		r.ok(r.StreamSynchronize(c, s))
		r.ok(hosted.SetPeerAccess(peer, false))
		launch()
	})
}

// A thread without a current context may destroy what a context owns, and nothing else.
func TestWhatIsDestroyedTellsItsContext(t *testing.T) {
	r := start(t, Options{})
	s, res := r.StreamCreate(r.ctx, 1)
	r.ok(res)
	e, res := r.EventCreate(r.ctx, 2)
	r.ok(res)
	p, res := r.MemAlloc(r.ctx, 64)
	r.ok(res)
	host, res := r.MemHostAlloc(r.ctx, 64, 0)
	r.ok(res)
	mod, res := r.ModuleLoadData(r.ctx, []byte(testPTX))
	r.ok(res)
	_, res = r.MemAlloc(0, 64)
	r.is(driver.InvalidContext, res)
	r.ok(r.ModuleUnload(0, mod))
	r.ok(r.MemFreeHost(0, host))
	r.ok(r.MemFree(0, p))
	r.is(driver.InvalidContext, r.MemFree(0, p))
	r.ok(r.EventDestroy(0, e))
	r.ok(r.StreamDestroy(0, s))
	r.is(driver.InvalidContext, r.StreamDestroy(0, s))
}

// A reset destroys what the primary context owns, and leaves its handle and its users.
func TestAResetLeavesTheHandle(t *testing.T) {
	r := start(t, Options{Devices: []DeviceOptions{{ContextMemory: 100 << 20}}})
	before, _ := r.m.Memory(0)
	p, res := r.MemAlloc(r.ctx, 1<<20)
	r.ok(res)
	r.ok(r.lib.(driver.Hosted).ResetPrimary(0))
	r.is(driver.InvalidValue, r.MemFree(r.ctx, p))
	_, res = r.MemAlloc(r.ctx, 64)
	r.is(driver.ContextDestroyed, res)
	after, _ := r.m.Memory(0)
	require.Equal(t, before, after)
	c, res := r.DevicePrimaryCtxRetain(0)
	r.ok(res)
	require.Equal(t, r.ctx, c)
	p, res = r.MemAlloc(r.ctx, 64)
	r.ok(res)
	r.ok(r.MemFree(r.ctx, p))
	r.ok(r.DevicePrimaryCtxRelease(0))
	require.Len(t, r.m.Leaks(), 1, "the context alone: what the reset freed is no leak")
	r.is(driver.InvalidDevice, r.lib.(driver.Hosted).ResetPrimary(9))
}
