// Package checkpoint takes another process off the GPU, and puts it back, by the driver's
// calls for that. What it finds of a process decides what it does, so that whoever comes after
// a helper that was killed goes on where that one stopped.
package checkpoint

import (
	"fmt"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Process is another process, by its number.
type Process struct {
	sys *core.System
	pid int32
}

// Of returns a process. The System is of the calling one, and needs no context on any device.
func Of(sys *cuda.System, pid int) Process { return Process{core.SystemOf(sys), int32(pid)} }

// step is a call that brings a process on to a state.
type step struct {
	call driver.Call
	do   func(Process) driver.Result
	to   driver.ProcessState
}

// waking has the step from each state. There is no step from running, and none from failed.
var waking = map[driver.ProcessState]step{
	driver.ProcessCheckpointed: {driver.CallCheckpointProcessRestore, Process.restore, driver.ProcessLocked},
	driver.ProcessLocked:       {driver.CallCheckpointProcessUnlock, Process.unlock, driver.ProcessRunning},
}

func (p Process) restore() driver.Result { return p.sys.Drv.CheckpointProcessRestore(p.pid) }
func (p Process) unlock() driver.Result  { return p.sys.Drv.CheckpointProcessUnlock(p.pid) }

// Settle finds out whether the process's work ends within the timeout: it locks the process and
// unlocks it. No other call that is made here has a timeout.
func (p Process) Settle(timeout time.Duration) error {
	const op = "sleep"
	state, err := p.state(op)
	if err != nil || state == driver.ProcessCheckpointed {
		return err
	}
	if err := p.lock(op, state, timeout); err != nil {
		return err
	}
	return p.Wake()
}

// Sleep takes the process off the GPU. After an error the process runs on, or the error says
// what it is.
func (p Process) Sleep(timeout time.Duration) error {
	const op = "sleep"
	state, err := p.state(op)
	if err != nil || state == driver.ProcessCheckpointed {
		return err
	}
	if err := p.lock(op, state, timeout); err != nil {
		return err
	}
	if r := p.sys.Drv.CheckpointProcessCheckpoint(p.pid); r != driver.Success {
		err := p.fail(op, driver.CallCheckpointProcessCheckpoint, r)
		if after := p.Wake(); after != nil {
			return fmt.Errorf("%w; and then %w", err, after)
		}
		return err
	}
	return nil
}

// lock locks a process that runs.
func (p Process) lock(op string, state driver.ProcessState, timeout time.Duration) error {
	switch state {
	case driver.ProcessRunning:
		args := driver.LockArgs{TimeoutMS: uint32(max(1, timeout.Milliseconds()))} // 0 would be without an end
		if r := p.sys.Drv.CheckpointProcessLock(p.pid, args); r != driver.Success {
			return p.fail(op, driver.CallCheckpointProcessLock, r)
		}
	case driver.ProcessFailed:
		return p.lost(op)
	}
	return nil
}

// Wake puts the process back, from whatever state it is in. A process whose restore fails is
// lost.
func (p Process) Wake() error {
	const op = "wake"
	state, err := p.state(op)
	for err == nil && state != driver.ProcessRunning {
		s, ok := waking[state]
		if !ok {
			return p.lost(op)
		}
		if r := s.do(p); r != driver.Success {
			return p.fail(op, s.call, r)
		}
		state = s.to
	}
	return err
}

func (p Process) state(op string) (driver.ProcessState, error) {
	state, r := p.sys.Drv.CheckpointProcessGetState(p.pid)
	if r != driver.Success {
		return 0, p.fail(op, driver.CallCheckpointProcessGetState, r)
	}
	return state, nil
}

func (p Process) fail(op string, c driver.Call, r driver.Result) error {
	return p.sys.CallError(op, c, r, fmt.Sprintf("process %d", p.pid))
}

func (p Process) lost(op string) error {
	return errs.New(errs.Failure{Op: op, Kind: errs.DeviceLost, Asked: fmt.Sprintf("process %d: a restore failed, so it cannot use its devices any more", p.pid),
		Hint: "end the process, and start it again"})
}
