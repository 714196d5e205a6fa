package multicast_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// patience bounds what must not hang.
const patience = 20 * time.Second

// groupOf is a group of goroutines.
func groupOf(t testing.TB, ranks int) []*rendezvous.Group {
	t.Helper()
	groups, err := rendezvous.InProcess(ranks, rendezvous.Options{Timeout: patience})
	require.NoError(t, err)
	for _, g := range groups {
		closed(t, g)
	}
	return groups
}

// split deals devices to ranks, one behind the other.
func split(devices []*cuda.Device, ranks int) [][]*cuda.Device {
	dealt := make([][]*cuda.Device, ranks)
	for i := range dealt {
		dealt[i] = devices[i*len(devices)/ranks : (i+1)*len(devices)/ranks]
	}
	return dealt
}

// together runs a function for each rank at once.
func together[R any](ranks int, do func(rank int) R) []R {
	all := make([]R, ranks)
	var wg sync.WaitGroup
	for r := range ranks {
		wg.Go(func() { all[r] = do(r) })
	}
	wg.Wait()
	return all
}

type formed struct {
	team *multicast.Team
	err  error
}

func form(t testing.TB, groups []*rendezvous.Group, dealt [][]*cuda.Device, size int, o multicast.TeamOptions) []formed {
	t.Helper()
	return together(len(groups), func(rank int) formed {
		team, err := multicast.NewTeam(t.Context(), groups[rank], dealt[rank], size, o)
		return formed{team, err}
	})
}

func formAll(t testing.TB, groups []*rendezvous.Group, dealt [][]*cuda.Device, size int) (teams []*multicast.Team) {
	t.Helper()
	for _, f := range form(t, groups, dealt, size, multicast.TeamOptions{}) {
		require.NoError(t, f.err)
		teams = append(teams, f.team)
	}
	return teams
}

func leave(t testing.TB, teams []*multicast.Team) {
	t.Helper()
	for _, err := range together(len(teams), func(r int) error { return teams[r].Leave(t.Context()) }) {
		require.NoError(t, err)
	}
}

// use proves that a team works: all add up through it.
func use(t testing.TB, teams []*multicast.Team) {
	t.Helper()
	const n = 1000
	results := together(len(teams), func(r int) error { return addUp(teams[r], n) })
	require.NoError(t, errors.Join(results...))
}

// addUp writes each device's number, from 1, in its replica, and has the team add
// up; teams wait for each other by a counter in the replica.
func addUp(team *multicast.Team, n int) (err error) {
	const counter = 1 << 20
	members := team.Members()
	type member struct {
		s   *cuda.Stream
		mod *cuda.Module
	}
	var all []member
	defer func() {
		for _, m := range all {
			err = errors.Join(err, m.s.Close(), m.mod.Close())
		}
	}()
	launch := func(i int, name string, args ...any) error {
		k, err := all[i].mod.Kernel(name)
		if err != nil {
			return err
		}
		return k.Launch(all[i].s, cuda.Threads(1), args...)
	}
	for i, d := range team.Devices() {
		s, err := d.NewStream(cuda.StreamOptions{})
		if err != nil {
			return err
		}
		mod, err := d.LoadModule(kernels.Multimem)
		if err != nil {
			return errors.Join(err, s.Close())
		}
		all = append(all, member{s, mod})
		number := make([]byte, 4*n)
		for j := range n {
			number[4*j] = byte(team.First() + i + 1)
		}
		if err := s.Upload(team.Replica(i), number); err != nil {
			return err
		}
		if err := launch(i, kernels.Barrier, team.Ptr()+counter, team.Replica(i)+counter, uint32(members)); err != nil {
			return err
		}
	}
	// One adds up for all, when all have written; then all wait for it.
	if team.First() == 0 {
		if err := launch(0, kernels.Reduction{Element: kernels.U32, Op: kernels.Add}.AllReduce(), team.Ptr(), uint64(n)); err != nil {
			return err
		}
	}
	for i := range all {
		if err := launch(i, kernels.Barrier, team.Ptr()+counter, team.Replica(i)+counter, uint32(2*members)); err != nil {
			return err
		}
	}
	for i, m := range all {
		got := make([]byte, 4*n)
		if err := m.s.Download(got, team.Replica(i)); err != nil {
			return err
		}
		want := bytes.Repeat([]byte{byte(members * (members + 1) / 2), 0, 0, 0}, n)
		if !bytes.Equal(want, got) {
			return fmt.Errorf("device %d of the team has %v, not %v", team.First()+i, got[:8], want[:8])
		}
	}
	return nil
}

// One rank with all devices, several with some, and one each are the same.
func TestTeams(t *testing.T) {
	for _, row := range []struct{ devices, ranks int }{{1, 1}, {4, 1}, {2, 2}, {4, 2}, {7, 3}, {8, 8}} {
		t.Run(fmt.Sprintf("%d devices, %d ranks", row.devices, row.ranks), func(t *testing.T) {
			m, devices := open(t, row.devices)
			groups := groupOf(t, row.ranks)
			for range 2 { // and again with the same group
				teams := formAll(t, groups, split(devices, row.ranks), unit+1)
				next := 0
				for r, team := range teams {
					require.Equal(t, 2*unit, team.Size())
					require.Equal(t, row.devices, team.Members())
					require.Equal(t, next, team.First())
					require.Len(t, team.Devices(), len(split(devices, row.ranks)[r]))
					next += len(team.Devices())
				}
				require.Contains(t, teams[0].String(), "4 MiB each")
				use(t, teams)
				require.Empty(t, m.Fault())
				leave(t, teams)
				require.Empty(t, devices[0].System().Live())
				require.NoError(t, teams[0].Close())
				require.ErrorIs(t, teams[0].Leave(t.Context()), cuda.ErrClosed)
			}
			require.Zero(t, handles.OpenFDs())
		})
	}
}

// Nobody binds or maps before all have added their devices, and the object is
// not given up before all have it.
func TestOrderOfTheSteps(t *testing.T) {
	m, devices := open(t, 4)
	for _, d := range devices {
		_, err := d.Probe() // its trials are no part of the steps
		require.NoError(t, err)
	}
	groups := groupOf(t, 4)
	var mu sync.Mutex
	var calls []string
	m.OnCall(func(call string) {
		switch call {
		case "cuMulticastCreate", "cuMemImportFromShareableHandle", "cuMulticastAddDevice", "cuMulticastBindMem_v1":
			mu.Lock()
			calls = append(calls, call)
			mu.Unlock()
		}
	})
	teams := formAll(t, groups, split(devices, 4), unit)
	var want []string
	for _, c := range []struct {
		name string
		n    int
	}{{"cuMulticastCreate", 1}, {"cuMemImportFromShareableHandle", 3}, {"cuMulticastAddDevice", 4}, {"cuMulticastBindMem_v1", 4}} {
		for range c.n {
			want = append(want, c.name)
		}
	}
	leave(t, teams)
	require.Equal(t, want, calls)
}

// A call that fails on one rank fails the team for all: they name the rank and
// match the same sentinels; nothing is left, and the same group forms a team.
func TestOneRankFailsAndAllDo(t *testing.T) {
	const ranks = 3
	for call, row := range map[string]struct {
		result cuda.Code
		want   error
		step   string
	}{
		"cuMulticastGetGranularity":      {801, cuda.ErrNotSupported, "plan"},
		"cuMemCreate":                    {2, cuda.ErrOutOfMemory, ""},
		"cuMemAddressReserve":            {2, cuda.ErrOutOfAddressSpace, ""},
		"cuMulticastCreate":              {801, cuda.ErrNotSupported, "create"},
		"cuMemExportToShareableHandle":   {999, nil, "create"},
		"cuMemImportFromShareableHandle": {1, cuda.ErrInvalidArgument, "import"},
		"cuMulticastAddDevice":           {101, cuda.ErrInvalidArgument, "add devices"},
		"cuMulticastBindMem_v1":          {2, cuda.ErrOutOfMemory, "bind"},
		"cuMemMap":                       {401, nil, ""},
		"cuMemSetAccess":                 {101, cuda.ErrNotSupported, ""},
	} {
		t.Run(call, func(t *testing.T) {
			m, devices := open(t, ranks)
			for _, d := range devices {
				_, err := d.Probe() // its trials are no part of the steps
				require.NoError(t, err)
			}
			groups := groupOf(t, ranks)
			for after := range 3 {
				remove := m.Inject(sim.Fault{Call: call, Result: row.result, After: after})
				all := form(t, groups, split(devices, ranks), unit, multicast.TeamOptions{})
				remove()
				if all[0].err == nil {
					require.Positive(t, after, "the call was made")
					var teams []*multicast.Team
					for _, f := range all {
						teams = append(teams, f.team)
					}
					leave(t, teams)
					break
				}
				var named []int
				for r, f := range all {
					require.Nil(t, f.team)
					var e *multicast.TeamError
					require.ErrorAs(t, f.err, &e, "rank %d", r)
					require.ErrorIs(t, f.err, rendezvous.ErrFailed)
					require.Len(t, e.Ranks, 1)
					named = append(named, e.Ranks[0])
					require.ErrorContains(t, f.err, call)
					if row.step != "" {
						require.Equal(t, row.step, e.Step)
					}
					if row.want != nil {
						require.ErrorIs(t, f.err, row.want, "rank %d", r)
					}
				}
				require.Equal(t, []int{named[0], named[0], named[0]}, named)
				require.Empty(t, devices[0].System().Live())
				require.Zero(t, handles.OpenFDs())
			}
			teams := formAll(t, groups, split(devices, ranks), unit)
			use(t, teams)
			leave(t, teams)
		})
	}
}

// 'System not ready' is tried again, by all together, and not for ever.
func TestSystemNotReady(t *testing.T) {
	const ranks = 3
	for _, call := range []string{"cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem_v1", "cuMemMap"} {
		t.Run(call, func(t *testing.T) {
			m, devices := open(t, ranks)
			groups := groupOf(t, ranks)
			m.Inject(sim.Fault{Call: call, Result: 802, Times: 5})
			teams := formAll(t, groups, split(devices, ranks), unit)
			use(t, teams)
			leave(t, teams)
		})
	}
	defer multicast.NotReadyPause(time.Microsecond)()
	m, devices := open(t, ranks)
	groups := groupOf(t, ranks)
	remove := m.Inject(sim.Fault{Call: "cuMulticastBindMem_v1", Result: 802, Times: -1})
	all := form(t, groups, split(devices, ranks), unit, multicast.TeamOptions{})
	tried := m.Count("cuMulticastBindMem_v1")
	remove()
	require.Equal(t, ranks*8, tried)
	for _, f := range all {
		require.ErrorIs(t, f.err, rendezvous.ErrFailed)
		require.ErrorContains(t, f.err, "SYSTEM_NOT_READY")
	}
	teams := formAll(t, groups, split(devices, ranks), unit)
	leave(t, teams)
}

// A driver that does not come back makes the rank's team stuck, and the others
// go on without it.
func TestACallThatDoesNotComeBack(t *testing.T) {
	for _, call := range []string{"cuMulticastBindMem_v1", "cuMulticastAddDevice"} {
		t.Run(call, func(t *testing.T) {
			t.Parallel()
			m, devices := open(t, 3)
			groups := groupOf(t, 3)
			const blocks = 4 * time.Second
			m.Inject(sim.Fault{Call: call, Delay: blocks})
			began := time.Now()
			all := form(t, groups, split(devices, 3), unit, multicast.TeamOptions{CallTimeout: blocks / 4})
			stuck := -1
			for r, f := range all {
				require.ErrorIs(t, f.err, multicast.ErrStuck, "all are told")
				if f.team != nil {
					require.Equal(t, -1, stuck, "one is stuck")
					stuck = r
				}
			}
			require.GreaterOrEqual(t, stuck, 0)
			for _, f := range all {
				var e *multicast.TeamError
				require.ErrorAs(t, f.err, &e)
				require.Equal(t, []int{stuck}, e.Ranks)
			}
			team := all[stuck].team
			if time.Since(began) < blocks-time.Second { // unless this machine is slow
				began = time.Now()
				require.ErrorIs(t, team.Close(), multicast.ErrStuck)
				require.ErrorIs(t, team.Leave(t.Context()), multicast.ErrStuck)
				require.Less(t, time.Since(began), blocks/4, "at once")
				require.NotEmpty(t, devices[0].System().Live(), "its memory stays")
			}
			// When the call has come back after all, Close works.
			require.Eventually(t, func() bool { return team.Close() == nil }, patience, 20*time.Millisecond)
			require.Empty(t, devices[0].System().Live())
		})
	}
}

// GPU work that does not end makes Close answer in time, and again later.
func TestCloseDoesNotWaitForEver(t *testing.T) {
	m, devices := open(t, 1)
	groups := groupOf(t, 1)
	team, err := multicast.NewTeam(t.Context(), groups[0], devices, unit, multicast.TeamOptions{CallTimeout: 200 * time.Millisecond})
	require.NoError(t, err)
	s := stream(t, devices[0])
	m.Hold(s.Handle())
	require.NoError(t, s.Memset(team.Replica(0), 1, unit))
	err = team.Leave(t.Context())
	require.ErrorIs(t, err, multicast.ErrStuck)
	require.ErrorIs(t, team.Close(), multicast.ErrStuck)
	require.ErrorContains(t, team.Close(), "leave")
	m.Release(s.Handle())
	require.Eventually(t, func() bool { return team.Close() == nil }, patience, 10*time.Millisecond)
}

// Who does not come is named, and nobody waits longer than the group allows.
func TestARankThatDoesNotCome(t *testing.T) {
	_, devices := open(t, 3)
	groups, err := rendezvous.InProcess(3, rendezvous.Options{Timeout: 200 * time.Millisecond})
	require.NoError(t, err)
	for _, g := range groups {
		closed(t, g)
	}
	began := time.Now()
	all := form(t, groups[:2], split(devices, 3), unit, multicast.TeamOptions{})
	require.Less(t, time.Since(began), patience)
	for _, f := range all {
		require.Nil(t, f.team)
		var e *multicast.TeamError
		require.ErrorAs(t, f.err, &e)
		require.Equal(t, "plan", e.Step)
	}
	require.Condition(t, func() bool {
		return errors.Is(all[0].err, handles.ErrTimeout) || errors.Is(all[1].err, handles.ErrTimeout)
	})
	require.ErrorContains(t, errors.Join(all[0].err, all[1].err), "rank 2")
}

func TestPlansThatAreNoTeam(t *testing.T) {
	o := sim.WithMulticast(3)
	o.Devices[2].Attributes = nil
	_, sys := sim.Open(t, o)
	devices := sys.Devices()
	groups := groupOf(t, 2)
	pair := [][]*cuda.Device{devices[:1], devices[1:2]}
	check := func(want error, says string, ranks []int, all []formed) {
		t.Helper()
		for _, f := range all {
			require.Nil(t, f.team)
			require.ErrorIs(t, f.err, want)
			require.ErrorContains(t, f.err, says)
			var e *multicast.TeamError
			require.ErrorAs(t, f.err, &e)
			require.Equal(t, ranks, e.Ranks)
		}
		require.Empty(t, sys.Live())
	}
	check(rendezvous.ErrDisagree, "another size", []int{1}, together(2, func(r int) formed {
		team, err := multicast.NewTeam(t.Context(), groups[r], pair[r], (r+1)*unit, multicast.TeamOptions{})
		return formed{team, err}
	}))
	check(cuda.ErrInvalidArgument, "both bring device", []int{0, 1}, form(t, groups, [][]*cuda.Device{devices[:1], devices[:1]}, unit, multicast.TeamOptions{}))
	check(cuda.ErrNotSupported, "device 2 (Software GPU) has no multicast", []int{1}, form(t, groups, [][]*cuda.Device{devices[:1], devices[2:]}, unit, multicast.TeamOptions{}))
	check(cuda.ErrInvalidArgument, "a nil device", []int{0}, form(t, groups, [][]*cuda.Device{{nil}, devices[:1]}, unit, multicast.TeamOptions{}))
	check(cuda.ErrInvalidArgument, "no devices", []int{1}, form(t, groups, [][]*cuda.Device{devices[:1], nil}, unit, multicast.TeamOptions{}))
	check(cuda.ErrInvalidArgument, "a size of 0 bytes", []int{0, 1}, form(t, groups, pair, 0, multicast.TeamOptions{}))
	check(cuda.ErrInvalidArgument, "Granularity(9)", []int{0, 1}, form(t, groups, pair, unit, multicast.TeamOptions{Granularity: vmm.Granularity(9)}))
	_, err := multicast.NewTeam(t.Context(), nil, devices[:1], unit, multicast.TeamOptions{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	// A context that has ended ends it for all, and the group with it.
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for r, f := range together(2, func(r int) formed {
		ctx := t.Context()
		if r == 1 {
			ctx = ended
		}
		team, err := multicast.NewTeam(ctx, groups[r], pair[r], unit, multicast.TeamOptions{})
		return formed{team, err}
	}) {
		require.ErrorContains(t, f.err, "context ended", "rank %d", r)
		require.Equal(t, r == 1, errors.Is(f.err, context.Canceled))
	}
}
