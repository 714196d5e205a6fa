//go:build linux

package vrange_test

import (
	"fmt"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/vrange"
	"github.com/stretchr/testify/require"
)

const (
	mib = 2 << 20 // a chunk
	op  = "test"
)

// stretch is a range of some chunks, one behind the other, that device 0 may write and device
// 1 read.
type stretch struct {
	t     *testing.T
	m     *sim.Machine
	sys   *core.System
	r     *vrange.Range
	maps  []*vrange.Mapping
	sleep *core.Sleep
}

func on(ordinal int32) driver.Location {
	return driver.Location{Type: driver.LocationDevice, ID: ordinal}
}

func stretched(t *testing.T, chunks int) *stretch {
	m, sys := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 64 << 20}, {Memory: 64 << 20}}})
	r, err := vrange.Reserve(op, sys.Devices()[0], 16*mib, 0, 0)
	require.NoError(t, err)
	st := &stretch{t: t, m: m, sys: r.System(), r: r, sleep: &core.Sleep{What: "the range"}}
	var handles []*phys.Handle
	for range chunks {
		h, res, _ := phys.Create(st.sys, mib, driver.AllocationProp{Type: driver.AllocationPinned, Location: on(0)}, nil)
		require.Equal(t, driver.Success, res)
		handles = append(handles, h)
	}
	st.maps, err = r.Map(op, nil, 0, handles, memspec.Access{{Location: on(0), Flags: driver.AccessReadWrite}, {Location: on(1), Flags: driver.AccessRead}})
	require.NoError(t, err)
	t.Cleanup(func() {
		m.ClearFaults()
		require.NoError(t, r.Unmap(op, st.maps...))
		require.NoError(t, r.Close(op))
	})
	return st
}

// The states of a mapping's presence, in order.
const (
	isHere = iota
	isPaused
	isAway
	isPinned
)

func (st *stretch) bring(state int) {
	if state == isHere {
		return
	}
	require.NoError(st.t, st.r.Pause(op, st.maps, st.sleep))
	switch state {
	case isAway:
		require.NoError(st.t, st.r.TakeOut(op, st.maps))
	case isPinned:
		st.m.Inject(sim.Fault{Call: "cuMemUnmap", Times: 1 + len(st.maps), Result: cuda.Code(driver.Unknown)})
		require.Error(st.t, st.r.TakeOut(op, st.maps))
		st.m.ClearFaults()
	}
	require.Equal(st.t, state, st.state())
}

// state returns the state of the first mapping, and checks that the driver agrees.
func (st *stretch) state() int {
	m := st.maps[0]
	_, res := st.sys.Drv.MemGetAccess(on(0), m.Ptr())
	mapped := res == driver.Success
	switch {
	case m.Pinned():
		require.True(st.t, m.Away())
		return isPinned
	case m.Away():
		require.False(st.t, mapped, "it is mapped")
		return isAway
	}
	require.True(st.t, mapped, "it is not mapped")
	if m.Here(op) != nil {
		return isPaused
	}
	return isHere
}

// Each presence of a mapping permits what the table says, and the counts stay.
func TestMappingsWhoseMemoryIsAway(t *testing.T) {
	access := func(flags driver.AccessFlags) func(*stretch) error {
		return func(st *stretch) error {
			return st.r.SetAccess(op, 0, uint64(len(st.maps))*mib, func(driver.Location) (memspec.Access, error) {
				return memspec.Access{{Location: on(1), Flags: flags}}, nil
			})
		}
	}
	const no = -1
	for _, e := range []struct {
		name string
		do   func(st *stretch) error
		to   [4]int
	}{
		{"Pause", func(st *stretch) error { return st.r.Pause(op, st.maps, st.sleep) }, [4]int{isPaused, no, no, no}},
		{"Continue", func(st *stretch) error { st.r.Continue(st.maps); return nil }, [4]int{isHere, isHere, isAway, isPinned}},
		{"PutBack", func(st *stretch) error { return st.r.PutBack(op, st.maps, on(0)) }, [4]int{isAway: isPaused, isPinned: isPaused}},
		{"Unpin", func(st *stretch) error { return st.maps[0].Unpin(op) }, [4]int{isHere, isPaused, isAway, isAway}},
		{"raise", access(driver.AccessReadWrite), [4]int{isHere, no, no, no}},
		{"lower", access(driver.AccessNone), [4]int{isHere, no, isAway, isPinned}},
		{"View", func(st *stretch) error {
			v, err := st.maps[0].View(op, new(life.Life))
			require.Nil(st.t, v, "the memory lies on a device")
			return err
		}, [4]int{no, no, no, no}},
		{"Here", func(st *stretch) error { return st.maps[0].Here(op) }, [4]int{isHere, no, no, no}},
	} {
		for before, after := range e.to {
			if e.name == "PutBack" && before < isAway {
				continue // the engine's mistake: the driver refuses it
			}
			t.Run(fmt.Sprint(e.name, " in state ", before), func(t *testing.T) {
				st := stretched(t, 3)
				st.bring(before)
				calls := st.m.Count("cuMemSetAccess")
				err := e.do(st)
				switch {
				case after == no && e.name == "View" && before == isHere:
					require.ErrorIs(t, err, cuda.ErrNotSupported)
				case after == no:
					require.ErrorIs(t, err, cuda.ErrSuspended)
					require.ErrorContains(t, err, "the range was suspended at")
				default:
					require.NoError(t, err)
					require.Equal(t, after, st.state())
				}
				if before >= isAway && (e.name == "lower" || e.name == "raise") {
					require.Equal(t, calls, st.m.Count("cuMemSetAccess"), "the driver is called for memory that is away")
				}
				for _, m := range st.maps {
					require.EqualValues(t, 1, m.Memory.Mappings.Load(), "a count fell")
				}
			})
		}
	}
}

// Memory that is put back has the access that its places had, less what they lost meanwhile,
// and it takes one call for each run.
func TestMemoryIsPutBackInRuns(t *testing.T) {
	for _, lowered := range []bool{false, true} {
		st := stretched(t, 4)
		st.bring(isAway)
		if lowered {
			require.NoError(t, st.r.SetAccess(op, mib, 2*mib, func(driver.Location) (memspec.Access, error) {
				return memspec.Access{{Location: on(0), Flags: driver.AccessNone}}, nil
			}))
		}
		require.Empty(t, st.r.Devices(), "nothing is mapped that anyone could use")
		grants, maps := st.m.Count("cuMemSetAccess"), st.m.Count("cuMemMap")
		require.NoError(t, st.r.PutBack(op, st.maps, on(0)))
		require.Equal(t, maps+4, st.m.Count("cuMemMap"))
		runs := 1
		if lowered {
			runs = 3
		}
		require.Equal(t, grants+runs, st.m.Count("cuMemSetAccess"))
		mode := func(at int32, i int) driver.AccessFlags {
			flags, res := st.sys.Drv.MemGetAccess(on(at), st.maps[i].Ptr())
			require.Equal(t, driver.Success, res)
			return flags
		}
		for i := range st.maps {
			require.Equal(t, driver.AccessReadWrite, mode(0, i), "it is written now")
			require.Equal(t, driver.AccessRead, mode(1, i))
		}
		require.NoError(t, st.r.Regrant(op, st.maps, on(0)))
		st.r.Continue(st.maps)
		for i := range st.maps {
			want := driver.AccessReadWrite
			if lowered && (i == 1 || i == 2) {
				want = driver.AccessNone
			}
			require.Equal(t, want, mode(0, i))
			require.Equal(t, driver.AccessRead, mode(1, i))
		}
		require.Equal(t, isHere, st.state())
		unmaps := st.m.Count("cuMemUnmap")
		require.NoError(t, st.r.Unmap(op, st.maps...))
		require.Equal(t, unmaps+1, st.m.Count("cuMemUnmap"))
		st.maps = nil
	}
}

// What was unmapped for the suspension is not unmapped again, and what the driver refused is.
func TestUnmappingWhatIsAway(t *testing.T) {
	for state, want := range map[int]int{isAway: 0, isPinned: 3} {
		st := stretched(t, 3)
		st.bring(state)
		calls := st.m.Count("cuMemUnmap")
		require.NoError(t, st.r.UnmapRun(op, 0, 3*mib))
		require.Equal(t, calls+want, st.m.Count("cuMemUnmap"))
		require.Zero(t, st.m.Live()[sim.KindMapping])
		require.Zero(t, st.m.Live()[sim.KindAllocation], "their counts of the memory are given back")
		st.maps = nil
	}
}

// Some of a range can be away: the rest is mapped, granted and unmapped around it.
func TestRangesOfWhichAPartIsAway(t *testing.T) {
	st := stretched(t, 5)
	part := st.maps[1:3]
	require.NoError(t, st.r.Pause(op, part, st.sleep))
	require.NoError(t, st.r.TakeOut(op, part))
	require.ElementsMatch(t, []driver.Device{0, 1}, st.r.Devices())
	lower := func(driver.Location) (memspec.Access, error) {
		return memspec.Access{{Location: on(1), Flags: driver.AccessNone}}, nil
	}
	st.m.Inject(sim.Fault{Call: "cuMemSetAccess", After: 1, Result: cuda.Code(driver.Unknown)})
	require.Error(t, st.r.SetAccess(op, 0, 5*mib, lower))
	for _, m := range st.maps {
		require.Equal(t, driver.AccessRead, m.Access().Mode(on(1)), "it is undone")
	}
	grants := st.m.Count("cuMemSetAccess")
	require.NoError(t, st.r.SetAccess(op, 0, 5*mib, lower))
	require.Equal(t, grants+2, st.m.Count("cuMemSetAccess"), "one for each side")
	h, res, _ := phys.Create(st.sys, mib, driver.AllocationProp{Type: driver.AllocationPinned, Location: on(0)}, nil)
	require.Equal(t, driver.Success, res)
	more, err := st.r.Map(op, nil, 5*mib, []*phys.Handle{h}, nil)
	require.NoError(t, err)
	require.ErrorIs(t, st.r.MapRun(op, mib, []*phys.Handle{h}, nil), cuda.ErrInUse, "the place is taken while its memory is away")
	st.maps = append(st.maps, more...)
	unmaps := st.m.Count("cuMemUnmap")
	require.NoError(t, st.r.Unmap(op, st.maps...))
	require.Equal(t, unmaps+2, st.m.Count("cuMemUnmap"))
	st.maps = nil
}

// Whatever driver calls of taking out and putting back fail, the mappings are in one of their
// states, and a later try succeeds.
func TestFailuresOfTakingOutAndPuttingBack(t *testing.T) {
	var firsts []sim.Fault
	for call := range 12 {
		firsts = append(firsts, sim.Fault{After: call})
	}
	for _, call := range []string{"cuMemUnmap", "cuMemSetAccess"} {
		firsts = append(firsts, sim.Fault{Call: call, Parts: 2}, sim.Fault{Call: call, Parts: 3})
	}
	for _, first := range firsts {
		for second := range 6 {
			t.Run(fmt.Sprintf("%d %s %d %d", first.After, first.Call, first.Parts, second), func(t *testing.T) {
				st := stretched(t, 3)
				require.NoError(t, st.r.Pause(op, st.maps, st.sleep))
				first.Result = cuda.Code(driver.Unknown)
				st.m.Inject(first)
				if second > 0 {
					st.m.Inject(sim.Fault{After: first.After + second - 1, Result: cuda.Code(driver.Unknown)})
				}
				if st.r.TakeOut(op, st.maps) == nil {
					require.Equal(t, isAway, st.state())
				}
				for _, m := range st.maps {
					require.True(t, m.Away())
				}
				err := st.r.PutBack(op, st.maps, on(0))
				for _, m := range st.maps {
					require.Equal(t, err != nil, m.Away())
				}
				st.m.ClearFaults()
				for _, m := range st.maps {
					if m.Pinned() {
						require.NoError(t, m.Unpin(op))
					}
				}
				if err != nil {
					require.Zero(t, st.m.Live()[sim.KindMapping])
					require.NoError(t, st.r.PutBack(op, st.maps, on(0)))
				}
				require.NoError(t, st.r.Regrant(op, st.maps, on(0)))
				st.r.Continue(st.maps)
				require.Equal(t, isHere, st.state())
				require.Equal(t, 3, st.m.Live()[sim.KindMapping])
			})
		}
	}
}
