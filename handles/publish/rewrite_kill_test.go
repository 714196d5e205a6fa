//go:build linux

package publish_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
)

// tally is what a process has done. It stays in a file when the process is killed.
type tally struct {
	Proven    int // reads, each of one version and proven to be; of a publisher its rewritings
	Discarded int // reads that ended in an error, or were not proven
	Failed    string
}

func (y tally) store(path string) error {
	text, err := json.Marshal(y)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func loadTally(t *testing.T, path string) (y tally) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return y
	}
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &y))
	return y
}

// readerTask says how a follower in a process of its own reads.
type readerTask struct {
	mortal
	Way, Tally string
}

func init() {
	reexec.Register("reader of the rewriting", func(c *reexec.Child) error {
		var do readerTask
		if err := c.Recv(&do); err != nil {
			return err
		}
		_, err := do.live(func(d *cuda.Device, begin func()) error {
			begin()
			y, err := do.read(d)
			y.Failed = err.Error()
			return errors.Join(err, y.store(do.Tally))
		})
		return err
	})
}

// read reads until something goes wrong that no death of a publisher explains.
func (do readerTask) read(d *cuda.Device) (y tally, err error) {
	ctx := context.Background() // reexec bounds the child's life
	k, err := publish.Dial(ctx, do.Place.socket(), publish.DialOptions{Wait: true, ComeBack: &publish.ComeBack{First: time.Millisecond, Most: 5 * time.Millisecond}})
	if err != nil {
		return y, err
	}
	var f *publish.Follower[uint32]
	for f == nil {
		if err := k.Await(ctx, "numbers"); err != nil {
			return y, err
		}
		f, err = publish.Follow[uint32](ctx, k, d, "numbers", publish.FollowOptions{})
		if err != nil && !errors.Is(err, peer.ErrGone) && !errors.Is(err, publish.ErrUnknown) {
			return y, err
		}
	}
	var on []*cuda.Stream
	for range 2 {
		s, err := d.NewStream(cuda.StreamOptions{})
		if err != nil {
			return y, err
		}
		on = append(on, s)
	}
	for {
		got, err := reading[do.Way](ctx, f, on)
		switch {
		case err != nil:
			if !errors.Is(err, publish.ErrUnfinished) && !errors.Is(err, cuda.ErrOutOfRange) {
				return y, err
			}
			y.Discarded++
		case !f.Intact(f.Generation()):
			y.Discarded++
		default:
			if _, err := versionOf(got); err != nil {
				return y, fmt.Errorf("an intact generation: %w", err)
			}
			y.Proven++
		}
		if err := y.store(do.Tally); err != nil {
			return y, err
		}
	}
}

// actor is a process that is killed again and again.
type actor struct {
	role  string
	task  func(m mortal, tally string) any
	c     *reexec.Cmd
	tally string // of the process that runs
	past  tally  // of those before
	kill  int    // the driver call at which the next one dies
	walks int    // how often it died at all driver calls of its first rounds
}

// rewritingProgram is a publisher that rewrites, and its readers.
type rewritingProgram struct {
	t      *testing.T
	p      place
	dir    string
	starts int
	all    []*actor // the publisher first
}

func (w *rewritingProgram) start(a *actor, kill int) {
	w.t.Helper()
	w.starts++
	a.tally = filepath.Join(w.dir, strconv.Itoa(w.starts))
	a.c = reexec.Command(w.t, a.role)
	a.c.Timeout = time.Hour
	a.c.Start()
	a.c.Send(a.task(mortal{Place: w.p, N: 20_000, Kill: kill}, a.tally))
}

// bury adds up what a process did that has died.
func (w *rewritingProgram) bury(a *actor) tally {
	w.t.Helper()
	y := loadTally(w.t, a.tally)
	require.Empty(w.t, y.Failed, a.role)
	require.NotContains(w.t, a.c.Log(), "DATA RACE")
	a.past.Proven += y.Proven
	a.past.Discarded += y.Discarded
	return y
}

func (w *rewritingProgram) killNow(a *actor) {
	w.t.Helper()
	a.c.Kill()
	w.bury(a)
}

// killAtCall has a process die at its next driver call in turn.
func (w *rewritingProgram) killAtCall(a *actor) {
	w.t.Helper()
	w.killNow(a)
	w.start(a, a.kill)
	err := a.c.Exit()
	require.ErrorContains(w.t, err, "killed", "%s, at call %d: %s", a.role, a.kill, a.c.Log())
	if a.kill++; w.bury(a).Proven >= 2 {
		a.kill = 1
		a.walks++
	}
}

// hangs ends the test with the stacks of all processes.
func (w *rewritingProgram) hangs(of *actor) {
	w.t.Helper()
	for _, a := range w.all {
		_ = a.c.Process.Signal(syscall.SIGQUIT)
		_ = a.c.Exit()
		w.t.Logf("%s, %+v: %s", a.role, a.task(mortal{}, ""), a.c.Log())
	}
	w.t.Fatalf("%s does not go on", of.role)
}

// goesOn waits until every process has done something more.
func (w *rewritingProgram) goesOn() {
	w.t.Helper()
	for _, a := range w.all {
		now := loadTally(w.t, a.tally)
		before := now
		goesOn := func() bool {
			now = loadTally(w.t, a.tally)
			return now.Failed != "" || now.Proven+now.Discarded > before.Proven+before.Discarded
		}
		for until := time.Now().Add(peertest.Guard); !goesOn(); time.Sleep(time.Millisecond) {
			if time.Now().After(until) {
				w.hangs(a)
			}
		}
		require.Empty(w.t, now.Failed, a.role)
	}
}

// A publisher rewrites under readers of several streams, and either side is killed again and again: at any
// moment, and at every driver call. What a reader proves is one version, what it cannot prove it
// is told, and all others go on.
func TestRewritingsThatAreKilled(t *testing.T) {
	places(t, func(t *testing.T, p place, _ *cuda.Device) {
		rounds, first, pause := 8, func() int { return 1 + rand.IntN(60) }, 20*time.Millisecond
		if n, err := strconv.Atoi(os.Getenv("CUVMM_KILL_ROUNDS")); err == nil {
			rounds, first, pause = n, func() int { return 1 }, 200*time.Millisecond
		}
		w := &rewritingProgram{t: t, p: p, dir: t.TempDir()}
		w.all = append(w.all, &actor{role: "rewriter", kill: first(), task: func(m mortal, tally string) any {
			return rewriterTask{mortal: m, Tally: tally, First: uint32(w.starts)}
		}})
		for _, way := range []string{"two streams", "two streams that are released", "the host"} {
			w.all = append(w.all, &actor{role: "reader of the rewriting", kill: first(), task: func(m mortal, tally string) any {
				return readerTask{mortal: m, Way: way, Tally: tally}
			}})
		}
		for _, a := range w.all {
			w.start(a, 0)
		}
		w.goesOn()
		for round := range rounds {
			victim := w.all[0]
			if round%2 == 1 {
				victim = w.all[1+round/4%3]
			}
			time.Sleep(rand.N(pause))
			if p.Folder == "" || round/2%2 == 1 { // the real driver's calls are not counted
				w.killNow(victim)
			} else {
				w.killAtCall(victim)
			}
			w.start(victim, 0)
			w.goesOn()
		}
		for i, a := range w.all {
			w.killNow(a)
			require.NotZero(t, a.past.Proven)
			name := "publisher"
			if i > 0 {
				name = fmt.Sprintf("reader %d", i)
			}
			t.Logf("%s: %d proven, %d discarded, killed at every driver call %d times, and up to call %d", name, a.past.Proven, a.past.Discarded, a.walks, a.kill-1)
		}
	})
}
