package sock

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Process is another process, by a descriptor that never names another process, unlike
// its pid.
type Process struct{ f *os.File }

// Process opens the process at the other end of a connection that Dial made: the one
// that listens. It fails for a process that this one cannot see.
func (c *Conn) Process() (*Process, error) {
	var n int
	var err error
	if e := c.raw.Control(func(s uintptr) {
		if n, err = unix.GetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_PEERPIDFD); err != nil { // kernels before 6.5
			var cred *unix.Ucred
			if cred, err = unix.GetsockoptUcred(int(s), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
				n, err = unix.PidfdOpen(int(cred.Pid), 0)
			}
		}
	}); e != nil {
		return nil, e
	}
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	unix.CloseOnExec(n)
	if err := unix.SetNonblock(n, true); err != nil {
		_ = unix.Close(n)
		return nil, os.NewSyscallError("fcntl", err)
	}
	return &Process{os.NewFile(uintptr(n), "process")}, nil
}

// Wait waits for the end of the process, including the kernel's work for it.
func (p *Process) Wait(ctx context.Context) error {
	raw, err := p.f.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = p.f.Close() })
	defer stop()
	ended := false
	err = raw.Read(func(n uintptr) bool {
		ended = hasEnded(int(n))
		return ended
	})
	switch {
	case ended:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return errors.Join(err, fmt.Errorf("the process's descriptor was closed"))
}

// hasEnded reports whether the process of a descriptor has ended.
func hasEnded(n int) bool {
	ended, err := asked(n, unix.POLLIN)
	return err == nil && ended
}

// ProcessOf returns the process of a descriptor, which stays the caller's.
func ProcessOf(n int) (*Process, error) {
	n, err := unix.FcntlInt(uintptr(n), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		err = unix.SetNonblock(n, true)
	}
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	return &Process{os.NewFile(uintptr(n), "process")}, nil
}

// Dup returns another descriptor of the process.
func (p *Process) Dup() (*Process, error) {
	n, err := p.FD()
	if err != nil {
		return nil, err
	}
	return &Process{os.NewFile(uintptr(n), "process")}, nil
}

// FD returns the number of another descriptor of the process, which the caller closes.
func (p *Process) FD() (int, error) {
	raw, err := p.f.SyscallConn()
	if err != nil {
		return -1, err
	}
	n := -1
	if e := raw.Control(func(s uintptr) { n, err = unix.FcntlInt(s, unix.F_DUPFD_CLOEXEC, 0) }); e != nil {
		return -1, e
	}
	return n, os.NewSyscallError("fcntl", err)
}

// Close closes the descriptor.
func (p *Process) Close() error { return p.f.Close() }
