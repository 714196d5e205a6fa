//go:build unix

package serve

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

func owned(folder string, about fs.FileInfo) error {
	if s, ok := about.Sys().(*syscall.Stat_t); !ok || int(s.Uid) != os.Geteuid() {
		return fmt.Errorf("%s belongs to another user: "+remedy, folder)
	}
	return nil
}

// refused reports whether the error means that no process listens on the socket.
func refused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }
