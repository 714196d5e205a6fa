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
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/reexec"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/stretchr/testify/require"
)

// limit is how long the ranks wait for each other in a step.
const limit = 5 * time.Second

// order is what a process of a team is told to do: to take its place in a group,
// form a team, use it, and leave it.
type order struct {
	Dir        string // where rank 0 makes the group; it answers the path
	Path       string // where the others join it
	Rank, Size int
	// Kill ends the process at its so manieth driver call from Forming or
	// Leaving on; 0 never.
	Forming, Leaving int
	Fault            *sim.Fault // while it forms
	CallTimeout      time.Duration
}

// result is how it went.
type result struct {
	Path  string // rank 0's first answer
	Error string // of forming
	Ranks []int  // whom it names
	// TooLate: the group was over before it could join.
	TooLate bool
	Used    string // the error of using the team
	Left    string // the error of leaving it
	Took    time.Duration
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
		sys, err := m.Open(cuda.WithLeakTracing())
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
		ctx, cancel := context.WithTimeout(context.Background(), limit)
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
	began := time.Now()
	team, err := multicast.NewTeam(ctx, g, devices, unit, multicast.TeamOptions{CallTimeout: o.CallTimeout})
	r.Took, r.Calls = time.Since(began), int(calls.Load())
	m.OnCall(nil)
	m.ClearFaults()
	if err != nil {
		r.Error = err.Error()
		var e *multicast.TeamError
		if errors.As(err, &e) {
			r.Ranks = e.Ranks
		}
		for until := time.Now().Add(patience); team != nil && time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
			if team.Close() == nil {
				team = nil // what was stuck has come back
			}
		}
	} else {
		if err := addUp(team, 100); err != nil {
			r.Used = err.Error()
		}
		calls.Store(0)
		killAt(m, o.Leaving, &calls)
		began = time.Now()
		if err := team.Leave(ctx); err != nil {
			r.Left = err.Error()
			err = team.Close()
			if err != nil {
				return err
			}
		}
		r.Took = max(r.Took, time.Since(began))
		m.OnCall(nil)
	}
	_ = g.Close()
	r.Live, r.FDs, r.Faults = devices[0].System().Live(), handles.OpenFDs(), m.Fault()
	return c.Send(r)
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

// form has all form a team. Those for whom the change asks are told apart. It
// answers what each said; the victim, if any, says nothing and is gone.
func (c *company) form(change func(rank int, o *order), victim int) []result {
	c.t.Helper()
	c.next++
	answers := make([]result, len(c.members))
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
	for rank, m := range c.members {
		if rank == victim {
			_ = m.Exit() // it has ended, or does so now
			continue
		}
		m.Recv(&answers[rank])
		a := answers[rank]
		require.Less(c.t, a.Took, limit+patience/2, "%s, rank %d: %+v", c.at, rank, a)
		require.Empty(c.t, a.Live, "%s, rank %d", c.at, rank)
		require.Zero(c.t, a.FDs, "%s, rank %d", c.at, rank)
		require.Empty(c.t, a.Faults, "%s, rank %d", c.at, rank)
		require.Empty(c.t, a.Used, "%s, rank %d", c.at, rank)
	}
	if victim >= 0 {
		c.members = append(c.members[:victim:victim], c.members[victim+1:]...)
	}
	return answers
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
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		var err error
		u, err = sim.Inspect(folder)
		require.NoError(c.t, err)
		// A system may take a moment to clear away who was killed.
		if len(u.Processes) == len(c.members) || time.Now().After(end) {
			break
		}
	}
	require.Len(c.t, u.Processes, len(c.members), "%s: %v", c.at, u)
	require.Empty(c.t, u.Exported, "%s: %v", c.at, u)
	for _, d := range u.Devices {
		require.Less(c.t, d.Taken, uint64(unit), "%s: %v", c.at, u) // contexts have a little
	}
}

// Processes form teams while one of them fails, is late, or is killed at any
// driver call: all are told in time, nothing is left on the machine, and those
// that live form a team at once.
func TestTeamsOfProcesses(t *testing.T) {
	cases := 10
	if n, err := strconv.Atoi(os.Getenv("CUVMM_KILL_ROUNDS")); err == nil {
		cases = n
	}
	const most = 8
	o := sim.WithMulticast(most)
	o.Folder, o.Fabric = filepath.Join(t.TempDir(), "machine"), sim.Fabric{}
	private := filepath.Join(t.TempDir(), "private")
	for i := range o.Devices {
		o.Devices[i].Memory = 64 * mib
	}
	failed, killed, late := 0, 0, 0
	for n := range cases {
		rng := rand.New(rand.NewPCG(uint64(n), 7))
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
		answers := c.form(func(rank int, o *order) {
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
		for rank, a := range answers {
			switch {
			case rank == victim:
			case what == "a kill while forming" && victim >= 0 && when <= 20:
				require.NotEmpty(t, a.Error, "%s, rank %d", at, rank)
				require.True(t, a.TooLate || strings.Contains(a.Error, fmt.Sprintf("rank %d", who)), "%s, rank %d: %s", at, rank, a.Error)
			case what == "nothing", what == "a kill while forming" && victim < 0:
				require.Empty(t, a.Error+a.Left, "%s, rank %d", at, rank)
			case what == "a failure" || what == "a late call":
				require.Equal(t, answers[0].Error == "", a.Error == "", "%s: all or none, %+v", at, answers)
				require.Equal(t, answers[0].Ranks, a.Ranks, "%s: all name the same", at)
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
