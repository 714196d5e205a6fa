//go:build linux

package broker

import (
	"os"
	"os/exec"
	"testing"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

// A commit that waits for an earlier one of the object, whose copy then fails, is tried.
func TestACommitBehindOneThatFails(t *testing.T) {
	peertest.NoLeak(t)
	d := gputest.Software(t)
	fail := t.TempDir() + "/fail"
	b, err := New(t.Context(), d.System(), Options{
		Authorize: func(Caller, string) Grant { return Grant{Access: publish.WriteAccess, Copy: true} },
		Copy: func() *exec.Cmd {
			return failsOnce(fail)
		},
	})
	require.NoError(t, err)
	x := against(t, b, false)
	create := request{kind: wire.BrokerCreate, key: keeper.Key{1}, name: "w", device: d.UUID(), bytes: 1 << 20}
	require.Equal(t, wire.BrokerObject, x.ask(create).kind)
	memory, err := handles.ReceiveBuffer(peertest.Context(t), x.c, d, handles.ImportOptions{})
	require.NoError(t, err)
	manifest, err := exchange.TextFile("test", "a manifest", []byte(`{"bytes":1048576,"tensors":null}`))
	require.NoError(t, err)
	for i := range 2 {
		x.send((&request{kind: wire.BrokerCommit, number: uint32(i), key: create.key, manifest: manifest}).pack())
	}
	require.Equal(t, wire.BrokerStatus, x.ask(request{kind: wire.BrokerAsk}).kind, "the broker has both")
	require.NoError(t, os.WriteFile(fail, nil, 0o600))
	for i := range 2 {
		m, err := x.c.Receive(peertest.Context(t))
		require.NoError(t, err)
		got, err := parseReply(m)
		require.NoError(t, err)
		require.EqualValues(t, i, got.number)
		require.ErrorContains(t, got.err("test"), "the process that copies ended: exit status 1")
	}

	// Of those that wait as many as it likes are cancelled.
	require.NoError(t, os.Remove(fail))
	x.send((&request{kind: wire.BrokerCommit, number: 3, key: create.key, manifest: manifest}).pack())
	for i := range uint32(2 * maxAwaits) {
		x.send((&request{kind: wire.BrokerCommit, number: 10 + i, key: create.key, manifest: manifest}).pack())
		x.send((&request{kind: wire.BrokerCancel, number: 10 + i}).pack())
		m, err := x.c.Receive(peertest.Context(t))
		require.NoError(t, err)
		got, err := parseReply(m)
		require.NoError(t, err)
		require.Equal(t, 10+i, got.number)
		require.ErrorContains(t, got.err("test"), "which does not wait")
		require.Equal(t, wire.BrokerStatus, x.ask(request{kind: wire.BrokerAsk}).kind)
	}
	require.NoError(t, os.WriteFile(fail, nil, 0o600))
	_, err = x.c.Receive(peertest.Context(t))
	require.NoError(t, err)
	require.NoError(t, manifest.Close())
	require.NoError(t, memory.Close())
	require.NoError(t, x.c.Close())
	require.NoError(t, <-x.ended)
	require.NoError(t, b.Close())
}
