//go:build linux

package etcd

import (
	"context"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/stretchr/testify/require"
)

// A server that stands still holds up nothing for longer than its limit: neither
// joining, nor a step, nor closing while a step runs.
func TestAServerThatStandsStill(t *testing.T) {
	s := newServer(t, "127.0.0.1")
	const limit, long = 500 * time.Millisecond, 10 * time.Minute
	short := group(t, s.endpoint, "short", 2, Options{TTL: time.Minute, Options: rendezvous.Options{Timeout: joining}})
	patient := group(t, s.endpoint, "patient", 2, Options{TTL: time.Minute, Options: rendezvous.Options{Timeout: long}})
	late := client(t, s.endpoint)
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGSTOP))
	defer func() { _ = s.cmd.Process.Signal(syscall.SIGCONT) }()

	_, err := Join(context.Background(), late, "new", 0, 1, Options{Options: rendezvous.Options{Timeout: limit}})
	require.Error(t, err)
	require.ErrorContains(t, err, "etcd server")

	err = short[1].Barrier(context.Background(), "go")
	require.ErrorContains(t, err, "rank 1")
	require.ErrorContains(t, err, "could not announce its arrival")

	began := time.Now()
	done := make(chan error, 1)
	go func() { done <- patient[0].Barrier(context.Background(), "go") }()
	select {
	case err := <-done:
		require.NoError(t, err, "it waits for the server")
	case <-time.After(100 * time.Millisecond):
	}
	require.ErrorContains(t, patient[0].Close(), "see whether the etcd server responds")
	require.ErrorIs(t, <-done, cuda.ErrClosed)
	require.Less(t, time.Since(began), long)
}

// A group outlives a server that starts again before its leases end.
func TestAServerThatStartsAgain(t *testing.T) {
	s := newServer(t, "127.0.0.1")
	groups := group(t, s.endpoint, "again", 3, Options{TTL: 5 * time.Minute, Options: rendezvous.Options{Timeout: 3 * time.Minute}})
	step := func(name string) {
		t.Helper()
		for _, err := range together(groups, func(g *rendezvous.Group) error {
			all, err := g.AllGather(t.Context(), name, fmt.Append(nil, g.Rank()))
			for r := range all {
				if string(all[r]) != fmt.Sprint(r) {
					return fmt.Errorf("read %q of rank %d", all[r], r)
				}
			}
			return err
		}) {
			require.NoError(t, err)
		}
	}
	step("before")
	s.kill()
	s.start()
	step("after")
	step("after that")
}
