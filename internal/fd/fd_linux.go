package fd

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Take checks that n is an open descriptor and has it closed on exec.
func Take(n int) error {
	flags, err := unix.FcntlInt(uintptr(n), unix.F_GETFD, 0)
	if err != nil {
		return fmt.Errorf("fcntl: %w", err)
	}
	if flags&unix.FD_CLOEXEC == 0 {
		unix.CloseOnExec(n)
	}
	return nil
}

// Dup is another descriptor of the same file, closed on exec.
func Dup(n int) (int, error) {
	d, err := unix.FcntlInt(uintptr(n), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("fcntl: %w", err)
	}
	return d, nil
}

// Close releases the number, whatever it returns: another try could close a
// descriptor that was opened under it meanwhile.
func Close(n int) error {
	if err := unix.Close(n); err != nil && err != unix.EINTR {
		return fmt.Errorf("close: %w", err)
	}
	return nil
}

// Limit is how many descriptors this process may have open.
func Limit() (uint64, error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 0, fmt.Errorf("getrlimit: %w", err)
	}
	return l.Cur, nil
}

// Keep has a program that replaces this process get a descriptor (Exec), or no longer.
func Keep(n int, keep bool) error {
	if !keep {
		unix.CloseOnExec(n)
		return nil
	}
	if _, err := unix.FcntlInt(uintptr(n), unix.F_SETFD, 0); err != nil {
		return fmt.Errorf("fcntl: %w", err)
	}
	return nil
}

// Exec replaces this process by a program. It returns only if that failed.
func Exec(path string, args, environment []string) error {
	return fmt.Errorf("execve: %w", unix.Exec(path, args, environment))
}
