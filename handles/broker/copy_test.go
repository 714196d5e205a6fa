//go:build linux

package broker_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// copierRole is the process of Options.Copy: copier FOLDER.
func copierRole(args []string) error {
	sys, err := open(args[0])
	if err != nil {
		return err
	}
	c, err := peer.Inherit(os.NewFile(3, "the broker"), peer.Options{})
	if err != nil {
		return err
	}
	return errors.Join(broker.RunCopy(context.Background(), sys, c), c.Close(), sys.Close())
}

// What a user commits whose objects are copied is served from memory that no process of it had.
func TestWhatIsCommittedIsCopied(t *testing.T) {
	peertest.NoLeak(t)
	folder := t.TempDir()
	sys, err := open(folder)
	require.NoError(t, err)
	d := sys.Devices()[0]
	copier := func() *exec.Cmd { return as("copier", folder) }
	command := copier
	h := newHouse(t, d, broker.Options{
		Authorize: func(broker.Caller, string) broker.Grant { return broker.Grant{Access: publish.WriteAccess, Copy: true} },
		Copy: func() *exec.Cmd {
			c := command()
			c.Stderr = os.Stderr
			return c
		},
	})
	ctx := peertest.Context(t)
	writer, reader := h.dial(), h.dial()
	_, err = writer.Create(ctx, d, "w", broker.CreateOptions{Bytes: 1, Ephemeral: true})
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
	const n = 5*kib64 + 3
	before := used(t, sys)
	w, err := writer.Create(ctx, d, "w", broker.CreateOptions{Bytes: n})
	require.NoError(t, err)
	require.NoError(t, fill(w.Buffer(), pattern(n, 1)))
	command = func() *exec.Cmd { return exec.Command("false") }
	_, err = w.Commit(ctx, nil)
	require.ErrorContains(t, err, "the copy of what was written")
	_, err = reader.Attach(ctx, d, "w", broker.AttachOptions{})
	require.ErrorIs(t, err, broker.ErrWriting)
	require.Equal(t, before+6*kib64, used(t, sys), "nothing is left of a copy that failed")
	command = copier
	o, err := w.Commit(ctx, nil)
	require.NoError(t, err)
	require.EqualValues(t, 2, o.About().Version)
	got := attach(t, reader, d, "w", broker.AttachOptions{})
	require.Equal(t, pattern(n, 1), read(t, got.Buffer()))
	require.Equal(t, before+12*kib64, used(t, sys), "the writer has its own")
	closed(t, o)
	h.replace()
	closed(t, got)
	got = attach(t, reader, d, "w", broker.AttachOptions{})
	require.Equal(t, pattern(n, 1), read(t, got.Buffer()))
	require.Equal(t, before+6*kib64, used(t, sys))
	closed(t, got)
	require.NoError(t, reader.Remove(ctx, "w", 0))
	require.Equal(t, before, used(t, sys))
	t.Cleanup(func() { require.NoError(t, sys.Close()) })
}
