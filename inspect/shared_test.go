package inspect_test

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// Publications, followers and leases are shown until they end.
func TestTakeShowsWhatIsShared(t *testing.T) {
	_, sys := open(t)
	d := sys.Devices()[0]
	array, err := vmm.NewArray[float32](d, vmm.BufferOptions{})
	require.NoError(t, err)
	_, err = array.Append(nil, make([]float32, 1000))
	require.NoError(t, err)
	server := publish.NewServer(publish.ServerOptions{})
	listener, err := peer.Listen(filepath.Join(t.TempDir(), "own"), "server", peer.Options{})
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- server.Serve(t.Context(), listener) }()
	publication, err := publish.Array(server, "weights", array)
	require.NoError(t, err)
	require.NoError(t, publication.Announce(t.Context(), array.Len()))
	conn, err := peer.Dial(t.Context(), filepath.Join(filepath.Dir(listener.Path()), "server"), peer.Options{})
	require.NoError(t, err)
	client := publish.NewClient(conn)
	follower, err := publish.Follow[float32](t.Context(), client, d, "weights", publish.FollowOptions{ReadOnly: true})
	require.NoError(t, err)
	require.NoError(t, follower.Next(t.Context()))
	lease, err := handles.LeaseArray(array, handles.LeaseOptions{Handle: vmm.PosixFD, Timeout: time.Hour})
	require.NoError(t, err)

	for _, take := range []func() (inspect.Snapshot, error){
		func() (inspect.Snapshot, error) { return inspect.Take(sys) },
		func() (inspect.Snapshot, error) { return inspect.Summarize(sys) },
	} {
		s, err := take()
		require.NoError(t, err)
		require.Len(t, s.Publications, 1)
		p := s.Publications[0]
		require.Equal(t, "weights", p.Name)
		require.Equal(t, inspect.Address(array.Ptr()), p.Ptr)
		require.Equal(t, granule, p.Bytes)
		require.Len(t, p.Followers, 1)
		require.Equal(t, s.Process.PID, p.Followers[0].PID)
		require.Equal(t, granule, p.Followers[0].Bytes)
		require.Len(t, s.Followers, 1)
		f := s.Followers[0]
		require.Equal(t, inspect.Follower{Name: "weights", Ptr: inspect.Address(follower.Array().Ptr()), PID: s.Process.PID, Generation: p.Generation, Bytes: granule}, f)
		require.Len(t, s.Leases, 1)
		require.Equal(t, granule, s.Leases[0].Bytes)
		require.Greater(t, time.Until(s.Leases[0].Until), 50*time.Minute)
	}
	s, err := inspect.Take(sys)
	require.NoError(t, err)
	held := map[string]bool{}
	for _, r := range s.Reservations {
		held[s.Holder(r)] = true
	}
	require.True(t, held[`buffer, published as "weights"`])

	require.NoError(t, lease.Close())
	require.NoError(t, follower.Release())
	asleep, err := vmm.Suspend(t.Context(), vmm.SuspendOptions{}, array)
	require.NoError(t, err)
	s, err = inspect.Take(sys)
	require.NoError(t, err)
	require.True(t, s.Publications[0].Suspended)
	require.True(t, s.Followers[0].Suspended)
	require.NoError(t, asleep.Resume(t.Context()))
	require.NoError(t, follower.Next(t.Context()))
	s, err = inspect.Take(sys)
	require.NoError(t, err)
	require.False(t, s.Publications[0].Suspended || s.Followers[0].Suspended)

	require.NoError(t, publication.Withdraw())
	require.ErrorIs(t, follower.Next(t.Context()), publish.ErrWithdrawn)
	s, err = inspect.Take(sys)
	require.NoError(t, err)
	require.Contains(t, s.Followers[0].Stuck, "withdrawn")
	require.Empty(t, s.Leases)
	require.NoError(t, follower.Close())
	require.Eventually(t, func() bool {
		s, err := inspect.Take(sys)
		return err == nil && len(s.Publications)+len(s.Followers) == 0
	}, time.Minute, time.Millisecond)
	require.NoError(t, client.Close())
	require.NoError(t, listener.Close())
	require.NoError(t, <-served)
	require.NoError(t, server.Close())
	require.NoError(t, array.Close())
}
