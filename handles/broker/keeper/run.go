package keeper

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wait"
)

// RunOptions say what a keeper runs.
type RunOptions struct {
	// Command makes the command of the process to run, which is not started yet. Its first extra
	// file, descriptor 3, will be the connection to the keeper ([peer.Inherit]); those that the
	// command has already follow.
	Command func() *exec.Cmd
	// Restart, which may be nil, has the process replaced when a value is received: it is told to
	// end (SIGTERM), and the next is started when it has. A process that runs for less than a second is
	// not replaced before that.
	Restart <-chan os.Signal
	// Ending is how long the process may take to end when it is told to, before it is killed. 0 is
	// 10 seconds.
	Ending time.Duration
	// Log records each start, and each end at Warn. Nil discards that.
	Log *slog.Logger
}

// Run starts a process, serves it, and starts it again whenever it ends, however that happens, until
// the context ends; then it tells the process to end, waits for that, and returns nil. A process that
// ended within a second of its start is started again after a pause, of a second at most. If the first
// one ends before it has asked a keeper without entries for anything, Run returns its error.
func (k *Keeper) Run(ctx context.Context, o RunOptions) error {
	const op = "keeper.Keeper.Run"
	if o.Command == nil {
		return errs.PeerInvalid(op, "a nil RunOptions.Command", "name the program to run")
	}
	if o.Ending == 0 {
		o.Ending = 10 * time.Second
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	before, pause := k.served(), firstPause
	for ctx.Err() == nil {
		began := time.Now()
		asked, err := k.runOnce(ctx, o)
		switch {
		case ctx.Err() != nil:
			return nil
		case !asked && k.served() == before && k.Len() == 0:
			return errs.PeerCause(err, op, nil, "the broker ended before it began", "see what it says, and end what keeps it from starting")
		case asked:
			o.Log.Info("cuvmm: the broker was replaced", "entries", k.Len())
		default:
			o.Log.Warn("cuvmm: the broker has ended; it is started again", "error", err, "after", time.Since(began), "entries", k.Len())
		}
		if asked || time.Since(began) > shortest {
			pause = firstPause
			continue
		}
		wait.Sleep(ctx, pause)
		pause = min(2*pause, lastPause)
	}
	return nil
}

const (
	// shortest is how long a process runs that is started again at once.
	shortest              = time.Second
	firstPause, lastPause = 10 * time.Millisecond, time.Second
)

// runOnce runs the process to its end, and returns how it ended, and whether it was to be replaced.
func (k *Keeper) runOnce(ctx context.Context, o RunOptions) (asked bool, err error) {
	c, theirs, err := peer.Pair(peer.Options{MaxFDs: peer.MaxFDs})
	if err != nil {
		return false, err
	}
	defer func() { _ = c.Close() }()
	p := o.Command()
	p.ExtraFiles = append([]*os.File{theirs}, p.ExtraFiles...)
	err = p.Start()
	_ = theirs.Close() // else the end of the process would go unnoticed
	if err != nil {
		return false, err
	}
	o.Log.Info("cuvmm: the broker was started", "pid", p.Process.Pid)
	ended := make(chan error, 1)
	go func() { ended <- p.Wait() }()
	// Serve ends with the process, however it ends.
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	served := make(chan error, 1)
	go func() { served <- k.Serve(serving, c) }()
	asked, err = k.untilEnd(ctx, o, p.Process, ended)
	// What it sent before its end is still served.
	select {
	case e := <-served:
		err = errors.Join(err, e)
	case <-time.After(o.Ending): // a child of its own has the connection
		stop()
		err = errors.Join(err, <-served)
	}
	return asked, err
}

// untilEnd waits for the end of a process, and tells it to end when the context does, or when it is
// to be replaced.
func (k *Keeper) untilEnd(ctx context.Context, o RunOptions, p *os.Process, ended <-chan error) (asked bool, err error) {
	early := time.NewTimer(shortest)
	defer early.Stop()
	var restart <-chan os.Signal // that of the options once the process has had its time
	for waiting := true; waiting; {
		select {
		case err := <-ended:
			return false, err
		case <-early.C:
			restart = o.Restart
		case <-restart:
			asked, waiting = true, false
		case <-ctx.Done():
			waiting = false
		}
	}
	_ = p.Signal(syscall.SIGTERM)
	select {
	case err := <-ended:
		return asked, err
	case <-time.After(o.Ending):
	}
	_ = p.Kill()
	return asked, <-ended
}
