package multicast_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// rig is a machine with two devices and what an operation is tried on.
type rig struct {
	t       *testing.T
	sys     *cuda.System
	devices []*cuda.Device
	object  *multicast.Object
	memory  *vmm.Allocation
	own     *vmm.Mapping
	binding *multicast.Binding
	all     []closer // in the order in which they were made
}

// keep has what a call made closed at the end.
func keep[C closer](r *rig) func(c C, err error) (C, error) {
	return func(c C, err error) (C, error) {
		if err == nil {
			r.all = append(r.all, c)
		}
		return c, err
	}
}

func (r *rig) create(devices int, types vmm.HandleTypes) (err error) {
	r.object, err = keep[*multicast.Object](r)(multicast.Create(r.sys, unit, multicast.Properties{Devices: devices, Handles: types}))
	return err
}

func (r *rig) reserve() (*vmm.Reservation, error) {
	return keep[*vmm.Reservation](r)(vmm.Reserve(r.devices[0], unit, vmm.ReserveOptions{}))
}

// ready makes what the operations need.
func (r *rig) ready() error {
	require.NoError(r.t, r.create(2, vmm.PosixFD))
	for _, d := range r.devices {
		require.NoError(r.t, r.object.AddDevice(d))
	}
	var err error
	r.memory, err = keep[*vmm.Allocation](r)(vmm.Create(r.devices[0], unit, vmm.Properties{}))
	require.NoError(r.t, err)
	res, err := r.reserve()
	require.NoError(r.t, err)
	r.own, err = keep[*vmm.Mapping](r)(res.Map(0, r.memory))
	require.NoError(r.t, err)
	return r.own.SetAccess(vmm.Access{Location: r.devices[0].Location(), Mode: vmm.ReadWrite})
}

func (r *rig) bind() (err error) {
	r.binding, err = keep[*multicast.Binding](r)(r.object.Bind(r.devices[0], 0, r.memory, 0, unit))
	return err
}

// Every call of every operation fails once: what was there is as before, the
// operation or its retry then succeeds, and nothing is left at the end.
func TestEveryFailure(t *testing.T) {
	for name, row := range map[string]struct {
		setup, op func(r *rig) error
	}{
		"Create": {op: func(r *rig) error { return r.create(1, 0) }},
		"AddDevice": {setup: func(r *rig) error { return r.create(2, 0) },
			op: func(r *rig) error { return r.object.AddDevice(r.devices[1]) }},
		"Export": {setup: (*rig).ready, op: func(r *rig) error {
			f, err := r.object.Export()
			if err == nil {
				err = f.Close()
			}
			return err
		}},
		"Import": {setup: (*rig).ready, op: func(r *rig) error {
			f, err := r.object.Export()
			if err != nil {
				return err
			}
			defer func() { require.NoError(r.t, f.Close()) }()
			_, err = keep[*multicast.Object](r)(multicast.Import(r.sys, f, unit, 2))
			return err
		}},
		"Bind": {setup: (*rig).ready, op: (*rig).bind},
		"BindMapping": {setup: (*rig).ready, op: func(r *rig) error {
			_, err := keep[*multicast.Binding](r)(r.object.BindMapping(r.devices[0], 0, r.own, 0, unit))
			return err
		}},
		"Map": {setup: (*rig).ready, op: func(r *rig) error {
			res, err := r.reserve()
			if err != nil {
				return err
			}
			mp, err := keep[*vmm.Mapping](r)(res.Map(0, r.object))
			if err != nil {
				return err
			}
			return mp.SetAccess(vmm.Access{Location: r.devices[1].Location(), Mode: vmm.ReadWrite})
		}},
		"Binding.Close": {setup: func(r *rig) error { require.NoError(r.t, r.ready()); return r.bind() },
			op: func(r *rig) error { return r.binding.Close() }},
		"Object.Close": {setup: (*rig).ready, op: func(r *rig) error { return r.object.Close() }},
	} {
		t.Run(name, func(t *testing.T) {
			struck := 0
			for after := 0; ; after++ {
				m, err := sim.New(sim.WithMulticast(2))
				require.NoError(t, err)
				sys, err := m.Open(cuda.Options{TraceLeaks: true})
				require.NoError(t, err)
				r := &rig{t: t, sys: sys, devices: sys.Devices()}
				if row.setup != nil {
					require.NoError(t, row.setup(r))
				}
				before, live := sys.Stats(), m.Live()
				made := len(r.all)
				remove := m.Inject(sim.Fault{After: after, Result: 999})
				opErr := row.op(r)
				remove()
				if opErr != nil {
					struck++
					if len(r.all) == made {
						now := sys.Stats()
						require.Equal(t, before.Allocations, now.Allocations, "call %d", after)
						require.Equal(t, before.Mappings, now.Mappings, "call %d", after)
						for _, kind := range []string{sim.KindMulticast, sim.KindAllocation, sim.KindMapping, sim.KindReservation} {
							require.Equal(t, live[kind], m.Live()[kind], "call %d: %s", after, kind)
						}
					}
					require.NoError(t, row.op(r), "call %d: again", after)
				}
				for i := len(r.all) - 1; i >= 0; i-- {
					require.NoError(t, r.all[i].Close(), "call %d", after)
				}
				require.Empty(t, sys.Live())
				require.NoError(t, sys.Close())
				require.NoError(t, m.Close())
				if opErr == nil && after > 40 {
					break
				}
			}
			require.NotZero(t, struck)
		})
	}
}

// Every call of forming and leaving a team fails, and up to two more behind it,
// which strikes the undoing too. Then there is no team on any rank, and what is
// left of it goes with the next Drain.
func TestEveryFailureOfATeam(t *testing.T) {
	for _, row := range []struct{ ranks, times int }{{1, 1}, {2, 1}, {1, 2}, {2, 2}, {2, 3}} {
		failed, left, retried := 0, 0, 0
		for after, hit := 0, true; hit; after++ {
			at := fmt.Sprintf("%+v, call %d", row, after)
			m, err := sim.New(sim.WithMulticast(2))
			require.NoError(t, err)
			sys, err := m.Open(cuda.Options{TraceLeaks: true})
			require.NoError(t, err)
			probed(t, sys.Devices())
			groups := groupOf(t, row.ranks)
			dealt := split(sys.Devices(), row.ranks)
			struck := 0
			var calls atomic.Int64
			m.OnCall(func(string) { calls.Add(1) })
			remove := m.Inject(sim.Fault{After: after, Times: row.times, Result: 999})
			all := form(t, groups, dealt, unit, multicast.TeamOptions{})
			for r, f := range all {
				require.Equal(t, all[0].err == nil, f.err == nil, "%s, rank %d: %v", at, r, f.err)
				if f.err == nil {
					continue
				}
				struck++
				require.Nil(t, f.team, at)
				if strings.Contains(f.err.Error(), "undoing it failed, which System.Drain tries again") {
					left++
					require.Greater(t, row.times, 1, at)
				}
			}
			if struck > 0 {
				failed++
			} else {
				for _, err := range together(row.ranks, func(r int) error { return all[r].team.Leave(t.Context()) }) {
					if err != nil {
						struck++
						retried++
					}
				}
			}
			remove()
			hit = int(calls.Load()) > after
			for _, f := range all {
				if f.team != nil {
					require.NoError(t, f.team.Close(), at)
				}
			}
			require.NoError(t, sys.Drain(t.Context()), at)
			require.Empty(t, sys.Live(), at)
			require.Zero(t, peer.OpenFDs(), at)
			require.NoError(t, sys.Close(), at)
			require.NoError(t, m.Close(), at)
		}
		require.Greater(t, failed, 20)
		require.Greater(t, retried, 5)
		require.Equal(t, row.times > 1, left > 0)
	}
}
