package multicast_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// testTimeout guards against what must not hang.
const testTimeout = 2 * time.Minute

// groupOf is a group of goroutines.
func groupOf(t testing.TB, ranks int) []*rendezvous.Group {
	t.Helper()
	groups, err := rendezvous.InProcess(ranks, rendezvous.Options{Timeout: testTimeout})
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

// probed has devices tried what they can, so that the trials are no part of a
// team's steps.
func probed(t testing.TB, devices []*cuda.Device) {
	t.Helper()
	for _, d := range devices {
		_, err := d.Probe()
		require.NoError(t, err)
	}
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
		if err := launch(i, kernels.Barrier, team.Ptr()+counter, team.Replica(i)+counter, uint32(members), team.AbortWord()); err != nil {
			return err
		}
	}
	// One adds up for all, when all have written; then all wait for it.
	if team.First() == 0 {
		if err := launch(0, kernels.U32.AllReduce(), team.Ptr(), uint64(n)); err != nil {
			return err
		}
	}
	for i := range all {
		if err := launch(i, kernels.Barrier, team.Ptr()+counter, team.Replica(i)+counter, uint32(2*members), team.AbortWord()); err != nil {
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
			require.Zero(t, peer.OpenFDs())
		})
	}
}

// Teams of one group and of several, on the same devices, at once.
func TestSeveralTeamsAtOnce(t *testing.T) {
	const ranks, at, rounds = 3, 3, 3
	m, devices := open(t, ranks)
	var groups [at][]*rendezvous.Group
	for i := range groups {
		groups[i] = groupOf(t, ranks)
	}
	errs := together(ranks*at, func(n int) error {
		g, own := groups[n/ranks][n%ranks], devices[n%ranks:][:1]
		var teams []*multicast.Team
		for range rounds { // each is there while the next ones are made
			team, err := multicast.NewTeam(t.Context(), g, own, unit, multicast.TeamOptions{})
			if err != nil {
				return err
			}
			teams = append(teams, team)
			if err := addUp(team, 100); err != nil {
				return err
			}
		}
		for _, team := range teams {
			if err := team.Leave(t.Context()); err != nil {
				return err
			}
		}
		return nil
	})
	require.NoError(t, errors.Join(errs...))
	require.Empty(t, m.Fault())
	require.Empty(t, devices[0].System().Live())
}

// By fabric handle, where there is no other: a text is all that travels.
func TestTeamsByFabricHandle(t *testing.T) {
	o := fabricMachine(t, 4)
	for i := range o.Devices {
		o.Devices[i].Attributes[int(driver.AttrHandlePosixFD)] = 0
	}
	m, sys := sim.Open(t, o)
	probed(t, sys.Devices())
	groups := groupOf(t, 3)
	for range 2 {
		teams := formAll(t, groups, split(sys.Devices(), 3), unit)
		use(t, teams)
		require.Zero(t, peer.OpenFDs())
		leave(t, teams)
		require.Empty(t, m.Fault())
	}
	// Devices of two parts of a fabric are in no team, and each rank is told why.
	o.Fabric.Clique = 7
	_, other := sim.Open(t, o)
	for r, f := range form(t, groupOf(t, 2), [][]*cuda.Device{sys.Devices()[:1], other.Devices()[1:2]}, unit, multicast.TeamOptions{}) {
		require.Nil(t, f.team)
		t.Log(r, f.err)
	}
}

// fabricMachine describes a machine that processes share, with an open channel.
func fabricMachine(t testing.TB, devices int) sim.Options {
	o := sim.WithMulticast(devices)
	o.Folder, o.Fabric = t.TempDir(), sim.Fabric{Channels: []int{0}}
	return o
}

// No rank binds or maps before all have added their devices, and the object is
// not given up before all have it.
func TestOrderOfTheSteps(t *testing.T) {
	m, devices := open(t, 4)
	probed(t, devices)
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
			probed(t, devices)
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
				require.Zero(t, peer.OpenFDs())
			}
			teams := formAll(t, groups, split(devices, ranks), unit)
			use(t, teams)
			leave(t, teams)
		})
	}
}

// Whatever a driver returns to one rank, the errors of all match the same.
func TestAllRanksMatchTheSameSentinels(t *testing.T) {
	defer multicast.NotReadyPause(time.Microsecond)()
	sentinels := []error{cuda.ErrOutOfMemory, cuda.ErrOutOfAddressSpace, cuda.ErrBudget, cuda.ErrNotSupported, cuda.ErrNotPermitted,
		cuda.ErrClosed, cuda.ErrInUse, cuda.ErrForeign, cuda.ErrOutOfRange, cuda.ErrCapacity, cuda.ErrCapturing, cuda.ErrDeviceLost,
		cuda.ErrNoDriver, cuda.ErrInvalidArgument, multicast.ErrStuck, multicast.ErrAborted, rendezvous.ErrDisagree,
		rendezvous.ErrFailed, peer.ErrGone, peer.ErrTimeout, peer.ErrProtocol, errors.ErrUnsupported}
	matched := map[error]bool{}
	for _, code := range []cuda.Code{1, 2, 3, 34, 46, 100, 101, 201, 208, 400, 401, 700, 719, 800, 801, 802, 900, 901, 906, 907, 999} {
		m, err := sim.New(sim.WithMulticast(2))
		require.NoError(t, err)
		sys, err := m.Open(cuda.Options{})
		require.NoError(t, err)
		probed(t, sys.Devices())
		m.Inject(sim.Fault{Call: "cuMulticastBindMem_v1", Result: code, After: 1, Times: -1})
		all := form(t, groupOf(t, 2), split(sys.Devices(), 2), unit, multicast.TeamOptions{})
		for _, s := range sentinels {
			require.Equal(t, errors.Is(all[0].err, s), errors.Is(all[1].err, s), "%d: %v: %v", code, s, all)
			matched[s] = matched[s] || errors.Is(all[0].err, s)
		}
		_ = sys.Close() // of a lost device something stays
		_ = m.Close()
	}
	require.True(t, matched[cuda.ErrCapturing] && matched[cuda.ErrNoDriver] && matched[cuda.ErrDeviceLost])
}

// What a rank of another make sends is an error that names it, and files that
// no rank requested are closed.
func TestARankThatSendsWhatNoRankSends(t *testing.T) {
	for _, body := range []string{``, `{}`, `[]`, `{"Body":{"Size":2097152}}`, `{"Body":{"Size":2097152,"Granularity":2097152,"Devices":"none"}}`} {
		_, devices := open(t, 1)
		groups := groupOf(t, 2)
		null := must(os.Open(os.DevNull))(t)
		file := must(peer.NewFD(must(fd.Dup(int(null.Fd())))(t)))(t)
		require.NoError(t, null.Close())
		all := together(2, func(r int) formed {
			if r == 0 {
				team, err := multicast.NewTeam(t.Context(), groups[0], devices, unit, multicast.TeamOptions{})
				return formed{team, err}
			}
			got, err := groups[1].Exchange(t.Context(), "multicast: plan", rendezvous.Contribution{Body: []byte(body), Files: []*peer.FD{file}})
			for i := range got {
				got[i].Close()
			}
			return formed{nil, err}
		})
		require.NoError(t, file.Close())
		require.ErrorIs(t, all[0].err, peer.ErrProtocol, body)
		require.ErrorContains(t, all[0].err, "rank 1 sent an invalid message")
		require.Zero(t, peer.OpenFDs(), body)
	}
}

// 'System not ready' is tried again, by all together, and not for ever.
func TestSystemNotReady(t *testing.T) {
	const ranks = 3
	for _, call := range []string{"cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem_v1", "cuMemMap", "cuMemSetAccess"} {
		t.Run(call, func(t *testing.T) {
			defer multicast.NotReadyPause(time.Millisecond)()
			m, devices := open(t, ranks)
			probed(t, devices)
			groups := groupOf(t, ranks)
			m.Inject(sim.Fault{Call: call, Result: 802, Times: 5})
			teams := formAll(t, groups, split(devices, ranks), unit)
			require.Equal(t, ranks, devices[0].System().Stats().Allocations, "earlier tries have left nothing")
			require.Equal(t, 2*ranks, m.Live()[sim.KindReservation])
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

// A driver that does not come back makes the rank's team stuck, and everybody is
// told in time.
func TestACallThatDoesNotComeBack(t *testing.T) {
	t.Cleanup(func() { require.Zero(t, peer.OpenFDs()) }) // when all have ended
	for _, call := range []string{"cuMulticastCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle",
		"cuMulticastAddDevice", "cuMulticastBindMem_v1"} {
		t.Run(call, func(t *testing.T) {
			t.Parallel()
			m, devices := open(t, 3)
			probed(t, devices)
			groups := groupOf(t, 3)
			comeBack := make(chan struct{})
			var first sync.Once
			m.OnCall(func(c string) {
				if c == call {
					first.Do(func() { <-comeBack }) // and the second waits for the first
				}
			})
			all := form(t, groups, split(devices, 3), unit, multicast.TeamOptions{CallTimeout: 2 * time.Second})
			stuck := 0
			for _, f := range all {
				require.ErrorIs(t, f.err, multicast.ErrStuck, "all are told")
				var e *multicast.TeamError
				require.ErrorAs(t, f.err, &e)
				if f.team == nil {
					continue
				}
				stuck++
				require.Zero(t, f.team.Ptr()+f.team.Replica(0)+f.team.AbortWord())
				f.team.Abort()
				require.ErrorIs(t, f.team.Close(), multicast.ErrStuck)
				require.ErrorIs(t, f.team.Leave(t.Context()), multicast.ErrStuck)
			}
			require.Positive(t, stuck)
			require.NotEmpty(t, devices[0].System().Live(), "its memory stays")
			// When the call has come back after all, Close works.
			close(comeBack)
			for _, f := range all {
				if f.team != nil {
					require.Eventually(t, func() bool { return !errors.Is(f.team.Leave(t.Context()), multicast.ErrStuck) }, testTimeout, time.Millisecond)
					require.ErrorIs(t, f.team.Leave(t.Context()), cuda.ErrClosed, "there is no team to leave")
					require.NoError(t, f.team.Close())
				}
			}
			require.Empty(t, devices[0].System().Live())
		})
	}
}

// GPU work that does not end makes Close return in time, and again later.
func TestCloseDoesNotWaitForEver(t *testing.T) {
	m, devices := open(t, 1)
	groups := groupOf(t, 1)
	team := formAll(t, groups, split(devices, 1), unit)[0]
	team.SetCallTimeout(50 * time.Millisecond)
	s := stream(t, devices[0])
	m.Hold(s.Handle())
	require.NoError(t, s.Memset(team.Replica(0), 1, unit))
	err := team.Leave(t.Context())
	require.ErrorIs(t, err, multicast.ErrStuck)
	require.ErrorIs(t, team.Close(), multicast.ErrStuck)
	require.ErrorContains(t, team.Close(), "waiting for the GPU's work has taken")
	m.Release(s.Handle())
	require.Eventually(t, func() bool { return team.Close() == nil }, testTimeout, 10*time.Millisecond)
}

// A team waits for the work on its rank's devices, and for no other: that may
// wait for this rank.
func TestATeamWaitsForItsOwnDevicesAlone(t *testing.T) {
	m, devices := open(t, 2)
	groups := groupOf(t, 1)
	s := stream(t, devices[1])
	other := mapped(t, allocation(t, devices[1], unit), devices[1])
	for _, end := range []func(team *multicast.Team) error{
		func(team *multicast.Team) error { return team.Leave(t.Context()) },
		(*multicast.Team).Close,
	} {
		team := formAll(t, groups, [][]*cuda.Device{devices[:1]}, unit)[0]
		m.Hold(s.Handle())
		require.NoError(t, s.Memset(other.Ptr(), 1, unit))
		require.NoError(t, end(team))
		done, err := s.Done()
		require.NoError(t, err)
		require.False(t, done)
		m.Release(s.Handle())
	}
}

// A team that was not formed was never used, so giving back what there was of it
// waits for no work.
func TestATeamThatFailsWaitsForNoWork(t *testing.T) {
	m, devices := open(t, 2)
	groups := groupOf(t, 1)
	s := stream(t, devices[1])
	other := mapped(t, allocation(t, devices[1], unit), devices[1])
	m.Hold(s.Handle())
	defer m.Release(s.Handle())
	require.NoError(t, s.Memset(other.Ptr(), 1, unit))
	live := devices[0].System().Live()
	defer m.Inject(sim.Fault{Call: "cuMemSetAccess", After: 2, Result: 999})()
	team, err := multicast.NewTeam(t.Context(), groups[0], devices, unit, multicast.TeamOptions{})
	require.ErrorContains(t, err, "cuMemSetAccess")
	require.NotErrorIs(t, err, multicast.ErrStuck)
	require.Nil(t, team)
	require.Len(t, devices[0].System().Live(), len(live))
}

// A rank whose work takes longer than the others wait for it loses nothing: they
// keep their replicas until they are told to close.
func TestARankThatIsLateToLeave(t *testing.T) {
	o := sim.WithMulticast(2)
	o.Folder = t.TempDir()
	one, first := sim.Open(t, o) // as in two processes
	two, second := sim.Open(t, o)
	groups := groupOf(t, 2)
	late := second.Devices()[1]
	teams := formAll(t, groups, [][]*cuda.Device{first.Devices()[:1], {late}}, unit)
	teams[1].SetCallTimeout(50 * time.Millisecond)
	s := stream(t, late)
	two.Hold(s.Handle())
	run(t, late, s, teams[1].Ptr())
	for r, err := range together(2, func(r int) error { return teams[r].Leave(t.Context()) }) {
		require.ErrorIs(t, err, multicast.ErrStuck, "rank %d", r)
		var e *multicast.TeamError
		require.ErrorAs(t, err, &e)
		require.Equal(t, []int{1}, e.Ranks)
		require.Equal(t, "leave", e.Step)
	}
	two.Release(s.Handle())
	require.NoError(t, s.Synchronize())
	require.Empty(t, one.Fault()+two.Fault(), "its kernel found all replicas")
	teams[1].SetCallTimeout(testTimeout)
	for again := true; again; { // until the call of before has come back
		for r, err := range together(2, func(r int) error { return teams[r].Leave(t.Context()) }) {
			if again = errors.Is(err, multicast.ErrStuck); !again {
				require.ErrorIs(t, err, multicast.ErrAborted, "rank %d: its work was told to end, whatever it was", r)
			}
		}
	}
	require.Zero(t, first.Stats().Allocations+second.Stats().Allocations)
}

// A kernel that waits for a rank that never comes is let go by Leave and Close,
// in time, or at once by Abort. Nothing stays, and no rank's context is lost.
func TestKernelsThatWaitForALostRank(t *testing.T) {
	for name, row := range map[string]struct {
		limit time.Duration // of the rank that waits
		end   func(team *multicast.Team) error
		want  error
	}{
		"Leave": {50 * time.Millisecond, func(team *multicast.Team) error { return team.Leave(t.Context()) }, peer.ErrGone},
		"Close": {50 * time.Millisecond, (*multicast.Team).Close, multicast.ErrAborted},
		"Abort, Close": {testTimeout, func(team *multicast.Team) error {
			team.Abort()
			return team.Close()
		}, nil},
		"Abort while Close waits": {testTimeout, func(team *multicast.Team) error {
			closing := make(chan error, 1)
			go func() { closing <- team.Close() }()
			team.Abort()
			return <-closing
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			m, devices := open(t, 2)
			groups := groupOf(t, 2)
			teams := formAll(t, groups, split(devices, 2), unit)
			team := teams[0]
			require.NoError(t, groups[1].Close()) // it is gone
			s, mod := stream(t, devices[0]), made[*cuda.Module](t)(devices[0].LoadModule(kernels.Multimem))
			k, err := mod.Kernel(kernels.Barrier)
			require.NoError(t, err)
			for range 2 { // the second does not begin to wait
				require.NoError(t, k.Launch(s, cuda.Threads(1), team.Ptr(), team.Replica(0), uint32(2), team.AbortWord()))
			}
			arrived := func(r int) byte { return must(m.Bytes(teams[r].Replica(0), 1))(t)[0] }
			require.Eventually(t, func() bool { return arrived(1) == 1 }, testTimeout, time.Millisecond)
			team.SetCallTimeout(row.limit)
			err = row.end(team)
			if row.want == nil {
				require.NoError(t, err)
			} else if !errors.Is(err, multicast.ErrStuck) { // unless this machine is very slow
				require.ErrorIs(t, err, row.want)
			}
			require.NoError(t, s.Synchronize(), "it was let go")
			require.EqualValues(t, 1, arrived(1))
			require.Eventually(t, func() bool { return team.Close() == nil }, testTimeout, time.Millisecond)
			require.ErrorIs(t, team.Leave(t.Context()), cuda.ErrClosed)
			team.Abort() // too late, and no harm
			require.NoError(t, teams[1].Close())
			require.Empty(t, m.Fault())
		})
	}
}

// Where giving back fails the others have left all the same: leaving again
// sends nothing.
func TestLeavingAgain(t *testing.T) {
	m, devices := open(t, 2)
	teams := formAll(t, groupOf(t, 2), split(devices, 2), unit)
	remove := m.Inject(sim.Fault{Call: "cuMulticastUnbind", Result: 999, Times: -1})
	for _, err := range together(2, func(r int) error { return teams[r].Leave(t.Context()) }) {
		require.ErrorContains(t, err, "cuMulticastUnbind")
	}
	remove()
	require.NoError(t, teams[0].Leave(t.Context()))
	require.NoError(t, teams[1].Leave(t.Context()))
	require.Empty(t, devices[0].System().Live())
	require.ErrorIs(t, teams[0].Leave(t.Context()), cuda.ErrClosed)

	// And where giving back does not come back it is not begun twice.
	team := formAll(t, groupOf(t, 1), [][]*cuda.Device{devices}, unit)[0]
	comeBack := make(chan struct{})
	var unbinds atomic.Int64
	m.OnCall(func(call string) {
		if call == "cuMulticastUnbind" {
			unbinds.Add(1)
			<-comeBack
		}
	})
	team.SetCallTimeout(50 * time.Millisecond)
	require.Eventually(t, func() bool {
		require.ErrorIs(t, team.Leave(t.Context()), multicast.ErrStuck)
		return unbinds.Load() == 1
	}, testTimeout, time.Millisecond)
	require.ErrorIs(t, team.Leave(t.Context()), multicast.ErrStuck)
	require.EqualValues(t, 1, unbinds.Load())
	close(comeBack)
	team.SetCallTimeout(testTimeout)
	require.Eventually(t, func() bool { return team.Leave(t.Context()) == nil }, testTimeout, time.Millisecond)
	require.EqualValues(t, 2, unbinds.Load())
}

// A rank that has lost its context tells the others as they leave.
func TestAllAreToldOfALostDevice(t *testing.T) {
	m, err := sim.New(sim.WithMulticast(2))
	require.NoError(t, err)
	sys, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	devices := sys.Devices()
	groups := groupOf(t, 2)
	teams := formAll(t, groups, split(devices, 2), unit)
	s := stream(t, devices[1])
	require.NoError(t, s.Memset(teams[1].Ptr(), 1, 1)) // undefined: it loses the context
	require.ErrorIs(t, s.Synchronize(), cuda.ErrDeviceLost)
	for r, err := range together(2, func(r int) error { return teams[r].Leave(t.Context()) }) {
		require.ErrorIs(t, err, cuda.ErrDeviceLost, "rank %d", r)
		var e *multicast.TeamError
		require.ErrorAs(t, err, &e)
		require.Equal(t, []int{1}, e.Ranks)
		require.NoError(t, teams[r].Close())
	}
	for _, f := range form(t, groups, split(devices, 2), unit, multicast.TeamOptions{}) {
		require.ErrorIs(t, f.err, cuda.ErrDeviceLost)
		require.Nil(t, f.team)
	}
	teams = formAll(t, groupOf(t, 1), [][]*cuda.Device{devices[:1]}, unit)
	use(t, teams)
	leave(t, teams)
	t.Cleanup(func() { _ = sys.Close(); _ = m.Close() }) // of a lost context something stays
}

// Where the program has called Abort on one rank all are told as they leave.
func TestAllAreToldOfAnAbort(t *testing.T) {
	_, devices := open(t, 3)
	groups := groupOf(t, 3)
	teams := formAll(t, groups, split(devices, 3), unit)
	teams[1].Abort()
	for r, err := range together(3, func(r int) error { return teams[r].Leave(t.Context()) }) {
		require.ErrorIs(t, err, multicast.ErrAborted, "rank %d", r)
		var e *multicast.TeamError
		require.ErrorAs(t, err, &e)
		require.Equal(t, []int{1}, e.Ranks)
	}
	require.Empty(t, devices[0].System().Live(), "they have left")
	teams = formAll(t, groups, split(devices, 3), unit)
	use(t, teams)
	leave(t, teams)
}

// A rank that does not come is named, the same by all.
func TestARankThatDoesNotCome(t *testing.T) {
	_, devices := open(t, 3)
	groups, err := rendezvous.InProcess(3, rendezvous.Options{Timeout: 200 * time.Millisecond})
	require.NoError(t, err)
	for _, g := range groups {
		closed(t, g)
	}
	for _, f := range form(t, groups[:2], split(devices, 3), unit, multicast.TeamOptions{}) {
		require.Nil(t, f.team)
		var e *multicast.TeamError
		require.ErrorAs(t, f.err, &e)
		require.Equal(t, "plan", e.Step)
		require.Contains(t, e.Ranks, 2)
		require.ErrorIs(t, f.err, peer.ErrTimeout)
	}
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
	check(cuda.ErrInvalidArgument, "both pass device", []int{0, 1}, form(t, groups, [][]*cuda.Device{devices[:1], devices[:1]}, unit, multicast.TeamOptions{}))
	check(cuda.ErrNotSupported, "device 2 (Software GPU) has no multicast", []int{1}, form(t, groups, [][]*cuda.Device{devices[:1], devices[2:]}, unit, multicast.TeamOptions{}))
	check(cuda.ErrInvalidArgument, "a nil device", []int{0}, form(t, groups, [][]*cuda.Device{{nil}, devices[:1]}, unit, multicast.TeamOptions{}))
	check(cuda.ErrInvalidArgument, "no devices", []int{1}, form(t, groups, [][]*cuda.Device{devices[:1], nil}, unit, multicast.TeamOptions{}))
	check(cuda.ErrInvalidArgument, "a size of 0 bytes", []int{0, 1}, form(t, groups, pair, 0, multicast.TeamOptions{}))
	check(cuda.ErrInvalidArgument, "a CallTimeout of -1s; use 0 for 10s, or more", []int{0, 1}, form(t, groups, pair, unit, multicast.TeamOptions{CallTimeout: -time.Second}))
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
