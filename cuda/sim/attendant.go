package sim

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/sock"
)

// attendant carries out, in a process on a machine with a folder, the calls for checkpoints
// that other processes make. It listens under the machine's identity and the process's number.
type attendant struct {
	listener *net.UnixListener
	serving  sync.WaitGroup
}

// request is one call, and reply what it returns.
type request struct {
	Call      uint32
	TimeoutMS uint32
}

type reply struct {
	Result int32
	State  driver.ProcessState
}

// attendantOf returns the name under which the attendant of a process listens.
func (m *Machine) attendantOf(pid int) string {
	id := m.books.Identity()
	return fmt.Sprintf("cuvmm-%016x%016x-%d", id[0], id[1], pid)
}

// attend begins to listen. Of several openings of a machine in one process the first does.
func (m *Machine) attend() {
	if m.books == nil || m.attendant != nil {
		return
	}
	l, err := sock.ListenAbstract(m.attendantOf(os.Getpid()))
	if err != nil {
		return
	}
	t := &attendant{listener: l}
	m.attendant = t
	t.serving.Go(func() {
		for {
			conn, err := l.AcceptUnix()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				t.serving.Go(func() { m.serve(conn) })
			}
		}
	})
}

// close waits for the calls that are carried out, which the closed machine ends.
func (t *attendant) close() {
	if t != nil {
		_ = t.listener.Close()
		t.serving.Wait()
	}
}

const requestTime = time.Second

func (m *Machine) serve(conn *net.UnixConn) {
	defer func() { _ = conn.Close() }()
	if !sock.OfThisUser(conn) {
		return
	}
	var q request
	_ = conn.SetReadDeadline(time.Now().Add(requestTime))
	if binary.Read(conn, binary.NativeEndian, &q) != nil {
		return
	}
	m.mu.Lock()
	r := driver.Result(driver.Deinitialized)
	if !m.closed {
		r = m.attendTo(driver.Call(q.Call), time.Duration(q.TimeoutMS)*time.Millisecond)
	}
	answer := reply{int32(r), m.process.state}
	m.mu.Unlock()
	_ = binary.Write(conn, binary.NativeEndian, answer) // the caller may be gone
}

func (m *Machine) attendTo(c driver.Call, timeout time.Duration) driver.Result {
	switch c {
	case driver.CallCheckpointProcessGetState:
		return driver.Success
	case driver.CallCheckpointProcessLock:
		return m.lockProcess(timeout)
	case driver.CallCheckpointProcessCheckpoint:
		return m.checkpointProcess()
	case driver.CallCheckpointProcessRestore:
		return m.restoreProcess()
	case driver.CallCheckpointProcessUnlock:
		return m.unlockProcess()
	}
	return driver.InvalidValue
}

// tell makes a call of this process about another one.
func (a *api) tell(c driver.Call, pid int32, timeout uint32) (driver.ProcessState, driver.Result) {
	if r := a.enter(c); r != driver.Success {
		return 0, r
	}
	m := a.m
	defer a.leave()
	switch {
	case int(pid) == os.Getpid() && c == driver.CallCheckpointProcessGetState:
		return m.process.state, driver.Success
	case int(pid) == os.Getpid():
		m.explain(c, "process %d is the calling one; another process must make the call", pid)
		return 0, driver.NotSupported
	case m.books == nil:
		m.explain(c, "process %d cannot be reached; give all processes one Folder (%s)", pid, MachineEnv)
		return 0, driver.InvalidValue
	}
	name := m.attendantOf(int(pid))
	m.mu.Unlock()
	answer, err := converse(name, request{uint32(c), timeout})
	m.mu.Lock()
	if err != nil {
		m.explain(c, "process %d is not on this machine, or not initialized: %v", pid, err)
		return 0, driver.OperatingSystem
	}
	return answer.State, driver.Result(answer.Result)
}

func converse(name string, q request) (answer reply, err error) {
	conn, err := sock.DialAbstract(name)
	if err != nil {
		return answer, err
	}
	defer func() { _ = conn.Close() }()
	if err = binary.Write(conn, binary.NativeEndian, q); err == nil {
		err = binary.Read(conn, binary.NativeEndian, &answer)
	}
	if errors.Is(err, io.EOF) {
		err = errors.New("it ended, or belongs to another user")
	}
	return answer, err
}

func (a *api) CheckpointProcessGetState(pid int32) (driver.ProcessState, driver.Result) {
	return a.tell(driver.CallCheckpointProcessGetState, pid, 0)
}

func (a *api) CheckpointProcessLock(pid int32, args driver.LockArgs) driver.Result {
	_, r := a.tell(driver.CallCheckpointProcessLock, pid, args.TimeoutMS)
	return r
}

func (a *api) CheckpointProcessCheckpoint(pid int32) driver.Result {
	_, r := a.tell(driver.CallCheckpointProcessCheckpoint, pid, 0)
	return r
}

func (a *api) CheckpointProcessRestore(pid int32) driver.Result {
	_, r := a.tell(driver.CallCheckpointProcessRestore, pid, 0)
	return r
}

func (a *api) CheckpointProcessUnlock(pid int32) driver.Result {
	_, r := a.tell(driver.CallCheckpointProcessUnlock, pid, 0)
	return r
}
