package sim

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/osmem"
	"github.com/stretchr/testify/require"
)

// busy does a bit of everything, each time from scratch, until stop returns
// true. Nothing of it may fail but for a closed machine.
func busy(d driver.Foreign, ctx driver.Context, seed uint64, stop func() bool) driver.Result {
	rng := rand.New(rand.NewPCG(seed, 1))
	var first driver.Result
	try := func(r driver.Result) bool {
		if r != driver.Success && first == driver.Success {
			first = r
		}
		return first == driver.Success
	}
	for !stop() && first == driver.Success {
		n := uint64(1+rng.IntN(4)) * chunk
		s, r := d.StreamCreate(ctx, driver.StreamFlags(rng.IntN(2)))
		try(r)
		e, r := d.EventCreate(ctx, 0)
		try(r)
		p, r := d.MemAddressReserve(n, 0, 0)
		try(r)
		types := driver.HandleTypes(0)
		if osmem.Linux {
			types = driver.HandlePosixFD
		}
		for off := uint64(0); off < n && first == driver.Success; off += chunk {
			h, r := d.MemCreate(chunk, on(0, types))
			if try(r) && try(d.MemMap(p+driver.Ptr(off), chunk, 0, h)) {
				try(d.MemRelease(h))
			}
		}
		if first != driver.Success {
			break
		}
		try(d.MemSetAccess(p, n, []driver.AccessDesc{grant(driver.LocationDevice, 0, driver.AccessReadWrite)}))
		try(d.MemsetD8Async(ctx, p, byte(seed), n, s))
		q, r := d.MemAllocAsync(ctx, 4096, s)
		try(r)
		try(d.MemcpyDtoDAsync(ctx, q, p, 4096, s))
		try(d.MemFreeAsync(ctx, q, s))
		try(d.EventRecord(ctx, e, s))
		try(d.StreamWaitEvent(ctx, driver.StreamLegacy, e))
		back := make([]byte, 64)
		try(d.MemcpyDtoHAsync(ctx, pointer(back), p+driver.Ptr(n)-64, 64, s))
		if first == driver.Success && back[63] != byte(seed) {
			return driver.Assert
		}
		switch rng.IntN(3) {
		case 0:
			try(d.StreamSynchronize(ctx, s))
		case 1:
			for {
				if r := d.EventQuery(ctx, e); r != driver.NotReady {
					try(r)
					break
				}
			}
		case 2:
			try(d.EventSynchronize(ctx, e))
		}
		if rng.IntN(8) == 0 {
			a, r := d.MemAlloc(ctx, 256)
			if try(r) {
				try(d.MemFree(ctx, a))
			}
		}
		try(d.MemUnmap(p, n))
		try(d.MemAddressFree(p, n))
		try(d.EventDestroy(ctx, e))
		try(d.StreamDestroy(ctx, s))
	}
	return first
}

func TestManyGoroutinesAtOnce(t *testing.T) {
	r := start(t, Options{})
	before := r.free()
	end := time.Now().Add(300 * time.Millisecond)
	var all sync.WaitGroup
	for i := range uint64(6) {
		all.Go(func() {
			res := busy(r.Foreign, r.ctx, i, func() bool { return time.Now().After(end) })
			if res != driver.Success {
				t.Errorf("goroutine %d: %v: %v", i, res, r.m.Log())
			}
		})
	}
	all.Wait()
	r.ok(r.CtxSynchronize(r.ctx))
	require.Equal(t, before, r.free())
	require.Equal(t, map[string]int{KindContext: 1}, r.m.Live())
}

func TestCloseInTheMiddleOfEverything(t *testing.T) {
	for i := range uint64(10) {
		m, err := New(Options{Seed: i})
		require.NoError(t, err)
		d := driver.Of(m).Foreign()
		require.Zero(t, d.Init())
		ctx, _ := d.DevicePrimaryCtxRetain(0)
		var all sync.WaitGroup
		for j := range uint64(4) {
			all.Go(func() {
				res := busy(d, ctx, j, func() bool { return false })
				if res != driver.Deinitialized {
					t.Errorf("goroutine %d: %v: %v", j, res, m.Log())
				}
			})
		}
		time.Sleep(time.Duration(i) * 3 * time.Millisecond)
		require.Error(t, m.Close())
		all.Wait()
	}
}
