package load_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/load"
	"golang.org/x/sys/unix"
)

func init() { reexec.Register("fill a disk", fillADisk) }

// A file system of 16 MiB that is full refuses a save, which leaves the file that was there whole, and
// nothing beside it.
func TestAFullDisk(t *testing.T) {
	c := reexec.Command(t, "fill a disk", t.TempDir())
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
	}
	c.Start()
	var mounted bool
	if c.Recv(&mounted); !mounted {
		needs.Lacks(t, "a namespace in which file systems can be mounted")
	}
	c.Wait()
}

func fillADisk(c *reexec.Child) error {
	folder := c.Args[0]
	mounted := unix.Mount("none", folder, "tmpfs", 0, "size=16m")
	if err := c.Send(mounted == nil); err != nil || mounted != nil {
		return err
	}
	b, s, err := inChild(16 * mib)
	if err != nil {
		return err
	}
	ctx, path := context.Background(), filepath.Join(folder, "model.safetensors")
	save := func(n int) error {
		return load.SaveSafetensors(ctx, load.SaveOptions{}, s, path, load.Saving{Name: "w", Element: handles.Uint8, Shape: []int{n}, From: b.Ptr()})
	}
	if err := save(6 * mib); err != nil {
		return fmt.Errorf("the first save, for which there is space: %w", err)
	}
	var e *load.Error
	failed := save(12 * mib)
	if !errors.Is(failed, syscall.ENOSPC) || !errors.As(failed, &e) || e.File != path || !strings.Contains(e.Hint, "free space") {
		return fmt.Errorf("a full disk: %w", failed)
	}
	left, err := os.ReadDir(folder)
	if err != nil || len(left) != 1 {
		return fmt.Errorf("the folder has %v (%w)", left, err)
	}
	m, err := load.OpenSafetensors(path)
	if err != nil {
		return err
	}
	l, err := m.Layout(0)
	if err == nil {
		_, err = m.Verify(ctx, load.Options{}, l)
	}
	if err == nil && l.Bytes != 6*mib {
		err = fmt.Errorf("the file has %d bytes", l.Bytes)
	}
	return errors.Join(err, m.Close(), save(6*mib))
}
