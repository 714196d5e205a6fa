package sealedfile_test

import (
	"bytes"
	"os"
	"testing"

	"github.com/cuvmm/cuvmm/internal/sealedfile"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestWhatIsSealedIsReadAndCannotChange(t *testing.T) {
	for _, contents := range [][]byte{nil, []byte("x"), bytes.Repeat([]byte("cuvmm"), 1<<20)} {
		n, err := sealedfile.New("test", contents)
		require.NoError(t, err)
		got, err := sealedfile.Read(n, len(contents))
		require.NoError(t, err)
		require.True(t, bytes.Equal(contents, got))
		_, err = unix.Pwrite(n, []byte("y"), 0)
		require.ErrorIs(t, err, unix.EPERM)
		require.ErrorIs(t, unix.Ftruncate(n, 1<<20), unix.EPERM)
		if len(contents) > 0 {
			_, err = sealedfile.Read(n, len(contents)-1)
			require.ErrorContains(t, err, "the most")
		}
		require.NoError(t, unix.Close(n))
	}
}

func TestOtherFilesAreRefused(t *testing.T) {
	plain, err := os.CreateTemp(t.TempDir(), "plain")
	require.NoError(t, err)
	defer plain.Close()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	partly, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(t, err)
	defer unix.Close(partly)
	_, err = unix.FcntlInt(uintptr(partly), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	require.NoError(t, err)
	for name, n := range map[string]int{"a file": int(plain.Fd()), "a pipe": int(r.Fd()), "not against writing": partly, "none": -1} {
		_, err := sealedfile.Read(n, 1<<20)
		require.ErrorIs(t, err, sealedfile.ErrNotSealed, name)
	}
}
