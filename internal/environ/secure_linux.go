package environ

import (
	"sync"

	"golang.org/x/sys/unix"
)

const atSecure = 23 // AT_SECURE of the kernel's auxiliary vector

// secure reports whether the kernel raised this program's rights. Without the
// kernel's word it compares the identities.
var secure = sync.OnceValue(func() bool {
	vector, err := unix.Auxv()
	if err != nil {
		return unix.Getuid() != unix.Geteuid() || unix.Getgid() != unix.Getegid()
	}
	for _, entry := range vector {
		if entry[0] == atSecure {
			return entry[1] != 0
		}
	}
	return false
})
