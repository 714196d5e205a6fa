//go:build linux && (amd64 || arm64)

package multicast_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/stretchr/testify/require"
)

// limit is how long the ranks wait for each other in a step, which none has to for
// long: it guards against what must not hang.
const limit = time.Minute

// order is what a process of a team is told to do: to take its place in a group,
// form a team, use it, and leave it.
type order struct {
	Dir        string // where rank 0 makes the group; it sends the path
	Path       string // where the others join it
	Rank, Size int
	// Kill ends the process at its so manieth driver call from Forming or
	// Leaving on; 0 never.
	Forming, Leaving int
	// Using ends it at its so manieth driver call while it uses the team.
	Using       int
	Fault       *sim.Fault // while it forms
	CallTimeout time.Duration
	// Absent: it does nothing with the team, until it is killed.
	Absent bool
	// Arrived, if not 0: its kernels wait for all devices, and it says so when so
	// many have arrived.
	Arrived int
	// Impatient: what it waits for may never come.
	Impatient bool
	// Hostless: rank 0 may be gone before this one joins.
	Hostless bool
}

// result is how it went.
type result struct {
	Path  string // rank 0's first reply
	Waits bool   // a reply before the last: its kernels wait
	Error string // of forming
	Ranks []int  // whom it names
	// TooLate: the group was over before it could join.
	TooLate bool
	Used    string // the error of using the team
	Left    string // the error of leaving it
	Live    []string
	FDs     int
	Faults  string
	Calls   int // driver calls while forming
}

func init() {
	reexec.Register("multicast: member", func(c *reexec.Child) error {
		var o sim.Options
		var own []int
		if err := errors.Join(json.Unmarshal([]byte(c.Args[0]), &o), json.Unmarshal([]byte(c.Args[1]), &own)); err != nil {
			return err
		}
		m, err := sim.New(o)
		if err != nil {
			return err
		}
		sys, err := m.Open(cuda.Options{TraceLeaks: true})
		if err != nil {
			return err
		}
		var devices []*cuda.Device
		for _, i := range own {
			d := sys.Devices()[i]
			devices = append(devices, d)
			if _, err := d.Probe(); err != nil { // its trials are no part of the steps
				return err
			}
		}
		for {
			var next order
			if c.Recv(&next) != nil {
				return errors.Join(sys.Close(), m.Close())
			}
			if err := obey(c, m, devices, next); err != nil {
				return err
			}
		}
	})
}

// killAt ends this process at a driver call.
func killAt(m *sim.Machine, n int, calls *atomic.Int64) {
	m.OnCall(func(string) {
		if calls.Add(1) == int64(n) {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
	})
}

// take takes this process's place in the group.
func take(c *reexec.Child, o order) (*rendezvous.Group, error) {
	opts := rendezvous.Options{Timeout: limit}
	if o.Rank > 0 {
		timeout := limit
		if o.Hostless {
			timeout = 5 * time.Second
		}
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		return rendezvous.Join(ctx, o.Path, o.Rank, o.Size, opts)
	}
	g, path, err := rendezvous.Host(o.Dir, "", o.Size, opts)
	if err != nil {
		return nil, err
	}
	return g, c.Send(result{Path: path})
}

func obey(c *reexec.Child, m *sim.Machine, devices []*cuda.Device, o order) (err error) {
	var r result
	ctx := context.Background()
	g, err := take(c, o)
	if err != nil {
		if o.Rank == 0 {
			return err
		}
		r.Error, r.TooLate = err.Error(), true // the host is gone already
		return c.Send(r)
	}
	defer func() { _ = g.Close() }()
	if o.Fault != nil {
		defer m.Inject(*o.Fault)()
	}
	var calls atomic.Int64
	killAt(m, o.Forming, &calls)
	team, err := multicast.NewTeam(ctx, g, devices, unit, multicast.TeamOptions{CallTimeout: o.CallTimeout})
	r.Calls = int(calls.Load())
	m.OnCall(nil)
	m.ClearFaults()
	if err != nil {
		r.Error = err.Error()
		var e *multicast.TeamError
		if errors.As(err, &e) {
			r.Ranks = e.Ranks
		}
		for until := time.Now().Add(testTimeout); team != nil && time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
			if team.Close() == nil {
				team = nil // what was stuck has come back
			}
		}
	} else {
		if o.Absent {
			select {}
		}
		calls.Store(0)
		killAt(m, o.Using, &calls)
		closing := func() error { return nil }
		switch {
		case o.Arrived > 0:
			closing, err = waitForAll(c, m, team, o.Arrived)
		case o.Impatient:
			err = addUpImpatiently(team)
		default:
			err = addUp(team, 100)
		}
		if err != nil {
			r.Used = err.Error()
		}
		calls.Store(0)
		killAt(m, o.Leaving, &calls)
		if err := team.Leave(ctx); err != nil {
			r.Left = err.Error()
			if err := closing(); err != nil {
				return err
			}
			for until := time.Now().Add(testTimeout); err != nil && time.Now().Before(until); time.Sleep(time.Millisecond) {
				if err = team.Close(); err != nil && !errors.Is(err, multicast.ErrStuck) {
					return err
				}
			}
		}
		m.OnCall(nil)
	}
	_ = g.Close()
	r.Live, r.FDs, r.Faults = devices[0].System().Live(), peer.OpenFDs(), m.Fault()
	return c.Send(r)
}

// waitForAll has a kernel on each device wait for all others of the team, and
// says so when so many have arrived. The function closes what the kernels need,
// which waits for them.
func waitForAll(c *reexec.Child, m *sim.Machine, team *multicast.Team, arrived int) (closing func() error, err error) {
	var all []closer
	for i, d := range team.Devices() {
		s, err := d.NewStream(cuda.StreamOptions{})
		if err != nil {
			return nil, err
		}
		mod, err := d.LoadModule(kernels.Multimem)
		if err != nil {
			return nil, err
		}
		all = append(all, s, mod)
		k, err := mod.Kernel(kernels.Barrier)
		if err != nil {
			return nil, err
		}
		if err := k.Launch(s, cuda.Threads(1), team.Ptr(), team.Replica(i), uint32(team.Members()), team.AbortWord()); err != nil {
			return nil, err
		}
	}
	for {
		b, err := m.Bytes(team.Replica(0), 1)
		if err != nil {
			return nil, err
		}
		if int(b[0]) == arrived {
			break
		}
		time.Sleep(time.Millisecond)
	}
	team.SetCallTimeout(100 * time.Millisecond)
	return func() (err error) {
		for _, o := range all {
			err = errors.Join(err, o.Close())
		}
		return err
	}, c.Send(result{Waits: true})
}

// addUpImpatiently is addUp, of which the waits are ended after a while.
func addUpImpatiently(team *multicast.Team) error {
	abort := time.AfterFunc(500*time.Millisecond, team.Abort)
	defer abort.Stop()
	return addUp(team, 100)
}

// company are processes with devices of one machine.
type company struct {
	t       *testing.T
	dir     string
	next    int
	members []*reexec.Cmd
	at      string // names the case in failures
}

// hire starts processes, which share the devices between them.
func hire(t *testing.T, o sim.Options, dir, at string, devices, processes int) *company {
	options, err := json.Marshal(o)
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(dir, 0o700))
	c := &company{t: t, dir: dir, at: at}
	for p := range processes {
		var own []int
		for d := p * devices / processes; d < (p+1)*devices/processes; d++ {
			own = append(own, d)
		}
		list, err := json.Marshal(own)
		require.NoError(t, err)
		child := reexec.Command(t, "multicast: member", string(options), string(list))
		child.Start()
		c.members = append(c.members, child)
	}
	return c
}

// tell has all form a team. Those for whom the change asks are told apart.
func (c *company) tell(change func(rank int, o *order)) {
	c.t.Helper()
	c.next++
	var host result
	for rank, m := range c.members {
		o := order{Dir: filepath.Join(c.dir, strconv.Itoa(c.next)), Path: host.Path, Rank: rank, Size: len(c.members)}
		if change != nil {
			change(rank, &o)
		}
		m.Send(o)
		if rank == 0 {
			m.Recv(&host)
		}
	}
}

// hear returns what each said; the victim, if any, says nothing and is gone. None
// has anything left.
func (c *company) hear(victim int) []result {
	c.t.Helper()
	results := make([]result, len(c.members))
	for rank, m := range c.members {
		if rank == victim {
			_ = m.Exit() // it has ended, or does so now
			continue
		}
		m.Recv(&results[rank])
		a := results[rank]
		require.Empty(c.t, a.Live, "%s, rank %d", c.at, rank)
		require.Zero(c.t, a.FDs, "%s, rank %d", c.at, rank)
	}
	return results
}

// without lets a member go.
func (c *company) without(rank int) { c.members = slices.Delete(slices.Clone(c.members), rank, rank+1) }

// form has all form a team and use it, without faults of their own.
func (c *company) form(change func(rank int, o *order), victim int) []result {
	c.t.Helper()
	c.tell(change)
	results := c.hear(victim)
	for rank, a := range results {
		require.Empty(c.t, a.Faults+a.Used, "%s, rank %d", c.at, rank)
	}
	if victim >= 0 {
		c.without(victim)
	}
	return results
}

// works requires that all form a team that works.
func (c *company) works() {
	c.t.Helper()
	for rank, a := range c.form(nil, -1) {
		require.Empty(c.t, a.Error+a.Left, "%s, rank %d", c.at, rank)
	}
}

// requireNothingTaken looks at the machine as a process that has no part in it.
func (c *company) requireNothingTaken(folder string) {
	c.t.Helper()
	var u sim.Usage
	for end := time.Now().Add(testTimeout); ; time.Sleep(time.Millisecond) {
		var err error
		u, err = sim.Inspect(folder)
		require.NoError(c.t, err)
		// A system may take a moment to clear away a killed process.
		if len(u.Processes) == len(c.members) || time.Now().After(end) {
			break
		}
	}
	require.Len(c.t, u.Processes, len(c.members), "%s: %v", c.at, u)
	require.Empty(c.t, u.Exported, "%s: %v", c.at, u)
	for _, d := range u.Devices {
		require.Less(c.t, d.Taken, unit, "%s: %v", c.at, u) // contexts have a little
	}
}

// machine describes one for teams of processes, with room for some.
func machine(t *testing.T, devices int) sim.Options {
	o := sim.WithMulticast(devices)
	o.Folder = filepath.Join(t.TempDir(), "machine")
	for i := range o.Devices {
		o.Devices[i].Memory = 64 * mib
	}
	return o
}

// A rank is killed while the kernels of all others wait for it. They are let go
// in time, their streams and teams close, their contexts live, and they form a
// team without it.
func TestAKillWhileKernelsWait(t *testing.T) {
	const devices = 8
	o := machine(t, devices)
	o.Fabric.Channels = []int{0}
	for _, row := range []struct{ processes, victim int }{{2, 0}, {3, 1}, {8, 7}} {
		at := fmt.Sprintf("%d processes, rank %d is killed", row.processes, row.victim)
		c := hire(t, o, filepath.Join(t.TempDir(), "private"), at, devices, row.processes)
		others := devices - ((row.victim+1)*devices/row.processes - row.victim*devices/row.processes)
		c.tell(func(rank int, o *order) {
			if o.Absent = rank == row.victim; !o.Absent {
				o.Arrived = others
			}
		})
		for rank, m := range c.members {
			if rank != row.victim {
				var r result
				m.Recv(&r)
				require.True(t, r.Waits, "%s, rank %d: %+v", at, rank, r)
			}
		}
		c.members[row.victim].Kill()
		for rank, a := range c.hear(row.victim) {
			if rank != row.victim {
				require.NotEmpty(t, a.Left, "%s, rank %d", at, rank)
				require.Empty(t, a.Faults+a.Used, "%s, rank %d", at, rank)
			}
		}
		c.without(row.victim)
		c.requireNothingTaken(o.Folder)
		c.works()
		for _, m := range c.members {
			m.Wait()
		}
	}
}

// A rank is killed at any driver call while all use the team. No rank hangs. Whose
// kernels touched the team's address afterwards has lost its context; the others
// form a team.
func TestAKillWhileATeamIsUsed(t *testing.T) {
	const most = 5
	o := machine(t, most)
	for n := range rounds(t, 3) {
		rng := rand.New(rand.NewPCG(uint64(n), 11))
		processes := 2 + rng.IntN(most-1)
		victim, when := rng.IntN(processes), 1+rng.IntN(25)
		at := fmt.Sprintf("round %d: rank %d of %d at call %d", n, victim, processes, when)
		c := hire(t, o, filepath.Join(t.TempDir(), "private"), at, most, processes)
		c.tell(func(rank int, o *order) {
			if o.Impatient = rank != victim; !o.Impatient {
				o.Using = when
			}
		})
		results := c.hear(victim)
		for rank := processes - 1; rank >= 0; rank-- {
			if rank == victim || results[rank].Faults != "" {
				_ = c.members[rank].Exit() // of a lost context something stays
				c.without(rank)
			}
		}
		c.requireNothingTaken(o.Folder)
		if len(c.members) > 0 {
			c.works()
		}
		for _, m := range c.members {
			m.Wait()
		}
	}
}

// rounds is how many random cases are tried; CUVMM_KILL_ROUNDS says otherwise.
func rounds(t *testing.T, usually int) int {
	t.Helper()
	text := os.Getenv("CUVMM_KILL_ROUNDS")
	if text == "" {
		return usually
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err)
	return n
}

// Processes form teams while one of them fails, is late, or is killed at any
// driver call: all are told in time, nothing is left on the machine, and those
// that live form a team at once.
func TestTeamsOfProcesses(t *testing.T) {
	const most = 8
	machines := []sim.Options{machine(t, most), machine(t, most)}
	machines[1].Fabric.Channels = []int{0}
	private := filepath.Join(t.TempDir(), "private")
	failed, killed, late := 0, 0, 0
	for n := range rounds(t, 10) {
		rng := rand.New(rand.NewPCG(uint64(n), 7))
		o := machines[n/5%2] // by descriptor, and by fabric handle
		devices := 1 + rng.IntN(most)
		processes := 1 + rng.IntN(devices)
		if n == 0 {
			devices, processes = most, most
		}
		who, when := rng.IntN(processes), 1+rng.IntN(45)
		what := []string{"nothing", "a failure", "a kill while forming", "a kill while leaving", "a late call"}[n%5]
		at := fmt.Sprintf("case %d: %d devices, %d processes, %s at rank %d, call %d", n, devices, processes, what, who, when)
		c := hire(t, o, filepath.Join(private, strconv.Itoa(n)), at, devices, processes)
		// The first calls of a device are others than the later ones.
		if rng.IntN(2) == 0 {
			c.works()
		}
		victim := -1
		if strings.HasPrefix(what, "a kill") && processes > 1 {
			victim = who
		}
		results := c.form(func(rank int, o *order) {
			o.Hostless = rank > 0 && victim == 0 && what == "a kill while forming"
			switch {
			case rank != who || what == "nothing":
			case what == "a failure":
				o.Fault = &sim.Fault{After: when, Result: []cuda.Code{1, 2, 401, 802, 999}[rng.IntN(5)]}
			case what == "a late call":
				o.Fault, o.CallTimeout = &sim.Fault{After: when, Delay: time.Second}, 300*time.Millisecond
			case victim < 0:
			case what == "a kill while forming":
				o.Forming = when
			default:
				o.Leaving = 1 + when%12
			}
		}, victim)
		for rank, a := range results {
			switch {
			case rank == victim:
			case what == "a kill while forming" && victim >= 0 && when <= 20:
				require.NotEmpty(t, a.Error, "%s, rank %d", at, rank)
				require.True(t, a.TooLate || strings.Contains(a.Error, fmt.Sprintf("rank %d", who)), "%s, rank %d: %s", at, rank, a.Error)
			case what == "nothing", what == "a kill while forming" && victim < 0:
				require.Empty(t, a.Error+a.Left, "%s, rank %d", at, rank)
			case what == "a kill while leaving":
				require.Empty(t, a.Error, "%s, rank %d", at, rank)
				if a.Left != "" {
					require.Contains(t, a.Left, fmt.Sprintf("rank %d", who), "%s, rank %d", at, rank)
				}
			case what == "a failure" || what == "a late call":
				require.Equal(t, results[0].Error == "", a.Error == "", "%s: all or none, %+v", at, results)
				require.Equal(t, results[0].Ranks, a.Ranks, "%s: all name the same", at)
			}
			if a.Error != "" {
				failed++
			}
		}
		if victim >= 0 {
			killed++
		}
		if what == "a late call" {
			late++
		}
		c.requireNothingTaken(o.Folder)
		if len(c.members) > 0 {
			c.works()
			c.requireNothingTaken(o.Folder)
		}
		for _, m := range c.members {
			m.Wait() // which reports what its machine found leaked
		}
		c.members = nil
		c.requireNothingTaken(o.Folder)
	}
	require.Positive(t, failed)
	require.Positive(t, killed)
	require.Positive(t, late)
}
