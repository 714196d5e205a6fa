package sim

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// modelMemory is an allocation in the model: a byte for every chunk stands for
// its contents.
type modelMemory struct {
	handle driver.MemHandle // 0 once released
	chunks []byte
	maps   int
}

// slot is a chunk of the model's reservation.
type slot struct {
	mem    *modelMemory // nil if nothing is mapped
	first  int          // the slot at which the mapping starts
	index  int          // the chunk of the memory that is here
	access driver.AccessFlags
}

// Virtual memory against a model of a dozen slots: whatever is mapped where,
// the results, the contents, the access and the free memory agree.
func TestVirtualMemoryMatchesAModel(t *testing.T) {
	const slots, limit = 12, 8
	rapid.Check(t, func(t *rapid.T) {
		m, err := New(Options{
			Devices:        []DeviceOptions{{Memory: limit * chunk}},
			ReuseAddresses: rapid.Bool().Draw(t, "reuse"),
		})
		require.NoError(t, err)
		d := driver.Of(m)
		require.Zero(t, d.Init())
		ctx, _ := d.DevicePrimaryCtxRetain(0)
		base, res := d.MemAddressReserve(slots*chunk, 0, 0)
		require.Zero(t, res)
		var model [slots]slot
		var memories []*modelMemory
		at := func(i int) driver.Ptr { return base + driver.Ptr(i*chunk) }
		drawRange := func(t *rapid.T) (lo, n int) {
			lo = rapid.IntRange(0, slots-1).Draw(t, "lo")
			return lo, rapid.IntRange(1, slots-lo).Draw(t, "n")
		}
		// whole tells whether a range cuts no mapping, and whether it has holes.
		whole := func(lo, n int) (cutsNone, covered bool) {
			cutsNone, covered = true, true
			for i := lo; i < lo+n; i++ {
				s := model[i]
				if s.mem == nil {
					covered = false
				} else if s.first < lo || s.first+len(s.mem.chunks) > lo+n {
					cutsNone = false
				}
			}
			return cutsNone, covered
		}
		unmap := func(lo, n int) {
			for i := lo; i < lo+n; i++ {
				if model[i].mem != nil && model[i].first == i {
					model[i].mem.maps--
				}
			}
			clear(model[lo : lo+n])
		}
		taken := func() (n int) {
			for _, mem := range memories {
				if mem.handle != 0 || mem.maps > 0 {
					n += len(mem.chunks)
				}
			}
			return n
		}
		result := func(ok bool) driver.Result {
			if ok {
				return driver.Success
			}
			return driver.InvalidValue
		}
		pick := func(t *rapid.T) *modelMemory {
			var live []*modelMemory
			for _, mem := range memories {
				if mem.handle != 0 {
					live = append(live, mem)
				}
			}
			if len(live) == 0 {
				t.Skip("no handle")
			}
			return rapid.SampledFrom(live).Draw(t, "memory")
		}
		t.Repeat(map[string]func(*rapid.T){
			"create": func(t *rapid.T) {
				n := rapid.IntRange(1, 3).Draw(t, "n")
				h, res := d.MemCreate(uint64(n*chunk), on(0, 0))
				if taken()+n > limit {
					require.Equal(t, driver.OutOfMemory, res)
					return
				}
				require.Zero(t, res)
				memories = append(memories, &modelMemory{handle: h, chunks: make([]byte, n)})
			},
			"release": func(t *rapid.T) {
				mem := pick(t)
				require.Zero(t, d.MemRelease(mem.handle))
				mem.handle = 0
			},
			"retain": func(t *rapid.T) {
				i := rapid.IntRange(0, slots-1).Draw(t, "slot")
				h, res := d.Foreign().MemRetainAllocationHandle(at(i) + 7)
				require.Equal(t, result(model[i].mem != nil), res)
				if res != driver.Success {
					return
				}
				if was := model[i].mem.handle; was != 0 {
					require.Equal(t, was, h)
					require.Zero(t, d.MemRelease(h))
				}
				model[i].mem.handle = h
			},
			"map": func(t *rapid.T) {
				mem, lo := pick(t), rapid.IntRange(0, slots-1).Draw(t, "lo")
				n := len(mem.chunks)
				fits := lo+n <= slots
				for i := lo; fits && i < lo+n; i++ {
					fits = model[i].mem == nil
				}
				require.Equal(t, result(fits), d.MemMap(at(lo), uint64(n*chunk), 0, mem.handle))
				if fits {
					mem.maps++
					for i := range n {
						model[lo+i] = slot{mem: mem, first: lo, index: i}
					}
				}
			},
			"unmap": func(t *rapid.T) {
				lo, n := drawRange(t)
				ok, _ := whole(lo, n)
				require.Equal(t, result(ok), d.MemUnmap(at(lo), uint64(n*chunk)))
				if ok {
					unmap(lo, n)
				}
			},
			"set access": func(t *rapid.T) {
				lo, n := drawRange(t)
				flags := rapid.SampledFrom([]driver.AccessFlags{0, 1, 3}).Draw(t, "flags")
				cutsNone, covered := whole(lo, n)
				res := d.MemSetAccess(at(lo), uint64(n*chunk), []driver.AccessDesc{grant(driver.LocationDevice, 0, flags)})
				require.Equal(t, result(cutsNone && covered), res)
				for i := lo; res == driver.Success && i < lo+n; i++ {
					model[i].access = flags
				}
			},
			"memset": func(t *rapid.T) {
				lo, n := drawRange(t)
				v := rapid.Byte().Draw(t, "v")
				_, covered := whole(lo, n)
				for i := lo; covered && i < lo+n; i++ {
					if model[i].access != driver.AccessReadWrite {
						t.Skip("the context would be lost")
					}
				}
				require.Equal(t, result(covered), d.MemsetD8Async(ctx, at(lo), v, uint64(n*chunk), 0))
				require.Zero(t, d.StreamSynchronize(ctx, 0))
				for i := lo; covered && i < lo+n; i++ {
					model[i].mem.chunks[model[i].index] = v
				}
			},
			"": func(t *rapid.T) {
				free, _ := m.Memory(0)
				require.Equal(t, (limit-taken())*chunk, free)
				for i, s := range model {
					got, res := d.MemGetAccess(driver.Location{Type: driver.LocationDevice}, at(i))
					require.Equal(t, result(s.mem != nil), res)
					require.Equal(t, s.access, got)
					if s.mem == nil {
						continue
					}
					for _, off := range []driver.Ptr{0, chunk - 1} {
						b, err := m.Bytes(cuda.Ptr(at(i)+off), 1)
						require.NoError(t, err)
						require.Equal(t, s.mem.chunks[s.index], b[0])
					}
				}
			},
		})
		for i := 0; i < slots; i++ {
			if model[i].mem != nil {
				require.Equal(t, driver.InvalidValue, d.MemAddressFree(base, slots*chunk))
				break
			}
		}
		require.Zero(t, d.MemUnmap(base, slots*chunk))
		require.Zero(t, d.MemAddressFree(base, slots*chunk))
		for _, mem := range memories {
			if mem.handle != 0 {
				require.Zero(t, d.MemRelease(mem.handle))
			}
		}
		require.Zero(t, d.DevicePrimaryCtxRelease(0))
		require.NoError(t, m.Close())
	})
}
