package host

import "golang.org/x/sys/unix"

// ThreadID names the calling operating system thread.
func ThreadID() int { return unix.Gettid() }
