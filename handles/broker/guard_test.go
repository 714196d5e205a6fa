//go:build linux

package broker

import (
	"log/slog"
	"os/exec"
	"testing"

	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/testlog"
	"github.com/stretchr/testify/require"
)

// A function of the options that panics, or returns nothing, fails the request that called it. The broker goes on.
func TestOptionsThatPanic(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	log := &testlog.Log{}
	command := func() *exec.Cmd { return nil }
	b, err := New(t.Context(), d.System(), Options{
		Authorize: func(Caller, string) Grant {
			return Grant{Access: publish.WriteAccess, Copy: true, Quota: Quota{Objects: 1, Counts: func(string) bool { panic("which count?") }}}
		},
		Copy: func() *exec.Cmd { return command() },
		Log:  slog.New(slog.NewTextHandler(log, nil)),
	})
	require.NoError(t, err)
	k := clientOf(t, b)
	ctx := peertest.Context(t)
	w, err := k.Create(ctx, d, "w", CreateOptions{Bytes: 1})
	require.NoError(t, err)
	_, err = k.Create(ctx, d, "v", CreateOptions{Bytes: 1})
	require.ErrorIs(t, err, ErrLimit, "every object counts")
	require.Contains(t, log.String(), "broker.Quota.Counts")
	_, err = w.Commit(ctx, nil)
	require.ErrorIs(t, err, ErrLimit, "its copy counts, too")
	b.o.Authorize = func(Caller, string) Grant { return Grant{Access: publish.WriteAccess, Copy: true} }
	_, err = w.Commit(ctx, nil)
	require.ErrorContains(t, err, "Options.Copy returned no command")
	command = func() *exec.Cmd { panic("which command?") }
	_, err = w.Commit(ctx, nil)
	require.ErrorContains(t, err, "Options.Copy returned no command")
	require.Contains(t, log.String(), "which command?")
	require.NoError(t, w.Close())
	require.NoError(t, k.Close())
	require.NoError(t, b.Close())
}
