//go:build linux

package broker_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/testlog"
	"github.com/stretchr/testify/require"
)

// copierRole is the process of Options.Copy, which begins once a file is there: copier FOLDER FILE. With the name of
// another file it makes that when it has replied, and stays.
func copierRole(args []string) error {
	for _, err := os.Stat(args[1]); err != nil; _, err = os.Stat(args[1]) {
		time.Sleep(time.Millisecond)
	}
	sys, err := open(args[0])
	if err != nil {
		return err
	}
	c, err := peer.Inherit(os.NewFile(3, "the broker"), peer.Options{})
	if err != nil {
		return err
	}
	err = errors.Join(broker.RunCopy(context.Background(), sys, c), c.Close(), sys.Close())
	if err == nil && len(args) > 2 {
		err = os.WriteFile(args[2], nil, 0o600)
		time.Sleep(time.Hour)
	}
	return err
}

// newCopies is a house whose broker copies what is committed, by the command.
func newCopies(t *testing.T, d *cuda.Device, command *func() *exec.Cmd, log io.Writer) *house {
	return newHouse(t, d, broker.Options{
		Authorize: func(broker.Caller, string) broker.Grant { return broker.Grant{Access: publish.WriteAccess, Copy: true} },
		Copy: func() *exec.Cmd {
			c := (*command)()
			c.Stderr = os.Stderr
			return c
		},
		Log: slog.New(slog.NewTextHandler(log, nil)),
	})
}

// What a user commits whose objects are copied is served from memory that no process of it had.
func TestWhatIsCommittedIsCopied(t *testing.T) {
	peertest.NoLeak(t)
	folder := t.TempDir()
	sys, err := open(folder)
	require.NoError(t, err)
	d := sys.Devices()[0]
	copier := func() *exec.Cmd { return as("copier", folder, folder) }
	command := copier
	log := &testlog.Log{}
	h := newCopies(t, d, &command, log)
	ctx := peertest.Context(t)
	writer, reader := h.dial(), h.dial()
	_, err = writer.Create(ctx, d, "w", broker.CreateOptions{Bytes: 1, Ephemeral: true})
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
	const n = 5*kib64 + 3
	before := used(t, sys)
	w, err := writer.Create(ctx, d, "w", broker.CreateOptions{Bytes: n})
	require.NoError(t, err)
	require.NoError(t, fill(w.Buffer(), pattern(n, 1)))
	command = func() *exec.Cmd { return exec.Command("sh", "-c", "kill -9 $$") }
	_, err = w.Commit(ctx, nil)
	require.ErrorContains(t, err, "the copy of what was written")
	require.ErrorContains(t, err, "the process that copies ended: signal: killed")
	require.Contains(t, log.String(), "could not be copied")
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

// A process that copies and does not end keeps no broker from ending, and the next one copies.
func TestAProcessThatCopiesAndStays(t *testing.T) {
	peertest.NoLeak(t)
	folder := t.TempDir()
	sys, err := open(folder)
	require.NoError(t, err)
	d := sys.Devices()[0]
	replied := folder + "/replied"
	command := func() *exec.Cmd { return as("copier", folder, folder, replied) }
	h := newCopies(t, d, &command, io.Discard)
	k := h.dial()
	ctx := peertest.Context(t)
	w, err := k.Create(ctx, d, "w", broker.CreateOptions{Bytes: kib64})
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() {
		o, err := w.Commit(ctx, nil)
		if err == nil {
			err = o.Close()
		}
		ended <- err
	}()
	require.Eventually(t, func() bool {
		_, err := os.Stat(replied)
		return err == nil
	}, peertest.Guard, time.Millisecond)
	h.end()
	command = func() *exec.Cmd { return as("copier", folder, folder) }
	h.start()
	require.NoError(t, <-ended)
	require.NoError(t, k.Remove(ctx, "w", 0))
	t.Cleanup(func() { require.NoError(t, sys.Close()) })
}

// A client goes on while what it committed is copied, and may ask again for what comes of it.
func TestAClientGoesOnWhileItsObjectIsCopied(t *testing.T) {
	peertest.NoLeak(t)
	folder := t.TempDir()
	sys, err := open(folder)
	require.NoError(t, err)
	d := sys.Devices()[0]
	begin := folder + "/begin"
	command := func() *exec.Cmd { return as("copier", folder, begin) }
	h := newCopies(t, d, &command, io.Discard)
	k := h.dial()
	ctx := peertest.Context(t)
	w, err := k.Create(ctx, d, "w", broker.CreateOptions{Bytes: kib64})
	require.NoError(t, err)
	require.NoError(t, fill(w.Buffer(), pattern(kib64, 1)))
	limited, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		_, err := w.Commit(limited, nil)
		ended <- err
	}()
	require.Eventually(t, func() bool {
		s, err := k.Status(ctx)
		require.NoError(t, err)
		return s.Bytes == 2*kib64
	}, peertest.Guard, time.Millisecond, "the copy is made")
	all, err := k.List(ctx)
	require.NoError(t, err)
	require.Len(t, all, 1, "and is nobody's yet")
	require.Equal(t, d.UUID(), all[0].Device)
	s, err := k.Status(ctx)
	require.NoError(t, err)
	require.Equal(t, 1, s.Writing)
	other, err := k.Create(ctx, d, "other", broker.CreateOptions{Bytes: kib64})
	require.NoError(t, err)
	closed(t, other)
	cancel()
	require.Error(t, <-ended)
	var o *broker.Object
	go func() {
		var err error
		o, err = w.Commit(ctx, nil)
		ended <- err
	}()
	time.Sleep(10 * time.Millisecond)
	require.NoError(t, os.WriteFile(begin, nil, 0o600))
	require.NoError(t, <-ended)
	require.EqualValues(t, 1, o.About().Version, "of one commit")
	got := attach(t, k, d, "w", broker.AttachOptions{})
	require.Equal(t, pattern(kib64, 1), read(t, got.Buffer()))
	closed(t, got, o)
	t.Cleanup(func() { require.NoError(t, sys.Close()) })
}

// No version is given twice, also if a commit that began before another one ends after it.
func TestVersionsOfCommitsThatOverlap(t *testing.T) {
	peertest.NoLeak(t)
	folder := t.TempDir()
	sys, err := open(folder)
	require.NoError(t, err)
	d := sys.Devices()[0]
	begin := folder + "/begin"
	h := newHouse(t, d, broker.Options{
		Authorize: func(_ broker.Caller, name string) broker.Grant {
			return broker.Grant{Access: publish.WriteAccess, Copy: name == "copied"}
		},
		Copy: func() *exec.Cmd { return as("copier", folder, begin) },
	})
	k, ctx := h.dial(), peertest.Context(t)
	w, err := k.Create(ctx, d, "copied", broker.CreateOptions{Bytes: kib64})
	require.NoError(t, err)
	var first *broker.Object
	ended := make(chan error, 1)
	go func() {
		var err error
		first, err = w.Commit(ctx, nil)
		ended <- err
	}()
	require.Eventually(t, func() bool {
		s, err := k.Status(ctx)
		require.NoError(t, err)
		return s.Bytes == 2*kib64
	}, peertest.Guard, time.Millisecond, "the copy is made")
	second := write(t, k, d, "other", kib64, 1, broker.CreateOptions{})
	require.NoError(t, os.WriteFile(begin, nil, 0o600))
	require.NoError(t, <-ended)
	closed(t, first, second)
	require.NoError(t, k.Remove(ctx, "other", 0))
	h.replace()
	third := write(t, k, d, "other", kib64, 2, broker.CreateOptions{})
	require.Equal(t, []uint64{1, 2, 3}, []uint64{first.About().Version, second.About().Version, third.About().Version})
	closed(t, third)
	t.Cleanup(func() { require.NoError(t, sys.Close()) })
}

// logged calls a function with each message of a log.
type logged func(message string)

func (l logged) Enabled(context.Context, slog.Level) bool { return true }
func (l logged) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l logged) WithGroup(string) slog.Handler            { return l }

func (l logged) Handle(_ context.Context, r slog.Record) error {
	l(r.Message)
	return nil
}

// A broker that ends between a commit and its reply leaves its client in no doubt, and commits nothing twice.
func TestACommitWhoseReplyIsLost(t *testing.T) {
	for _, copies := range []bool{false, true} {
		t.Run(fmt.Sprintf("copy %t", copies), func(t *testing.T) {
			peertest.NoLeak(t)
			folder := t.TempDir()
			sys, err := open(folder)
			require.NoError(t, err)
			d := sys.Devices()[0]
			var h *house
			replaced := make(chan struct{})
			var once sync.Once
			h = newHouse(t, d, broker.Options{
				Return: 50 * time.Millisecond,
				Authorize: func(broker.Caller, string) broker.Grant {
					return broker.Grant{Access: publish.WriteAccess, Copy: copies}
				},
				Copy: func() *exec.Cmd { return as("copier", folder, folder) },
				Log: slog.New(logged(func(message string) {
					if strings.Contains(message, "was committed") {
						once.Do(func() {
							b := h.b
							go func() {
								h.replace()
								close(replaced)
							}()
							for !b.Ending() {
								time.Sleep(time.Millisecond)
							}
						})
					}
				})),
			})
			k, ctx := h.dial(), peertest.Context(t)
			w, err := k.Create(ctx, d, "w", broker.CreateOptions{Bytes: kib64})
			require.NoError(t, err)
			require.NoError(t, fill(w.Buffer(), pattern(kib64, 1)))
			o, err := w.Commit(ctx, nil)
			require.NoError(t, err)
			<-replaced
			require.EqualValues(t, 1, o.About().Version)
			all, err := k.List(ctx)
			require.NoError(t, err)
			require.Len(t, all, 1)
			require.EqualValues(t, 1, all[0].Version)
			got := attach(t, k, d, "w", broker.AttachOptions{})
			require.Equal(t, pattern(kib64, 1), read(t, got.Buffer()))
			closed(t, got, o)
			require.NoError(t, k.Remove(ctx, "w", 0))
			require.Eventually(t, func() bool {
				s, err := k.Status(ctx)
				require.NoError(t, err)
				return s.Bytes == 0
			}, peertest.Guard, time.Millisecond)
			t.Cleanup(func() { require.NoError(t, sys.Close()) })
		})
	}
}
