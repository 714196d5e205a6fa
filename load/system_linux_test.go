package load_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cuvmm/cuvmm/load"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// dropFromCache writes a file to the disk and drops it from the page cache.
func dropFromCache(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return err
	}
	return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
}

// A pipe is no file, and is not waited for.
func TestAPipeIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, unix.Mkfifo(path, 0o600))
	_, err := load.OpenSafetensors(path)
	require.ErrorIs(t, err, load.ErrFormat)
	require.ErrorContains(t, err, "not a regular file")
}
