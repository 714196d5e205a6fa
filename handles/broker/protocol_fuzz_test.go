//go:build linux

package broker

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

var requests = []request{
	{kind: wire.BrokerCreate, number: 1, key: keeper.Key{1}, name: "w", device: cuda.UUID{2}, bytes: 3, ephemeral: true, alone: true},
	{kind: wire.BrokerAttach, number: 2, name: "w", version: 7},
	{kind: wire.BrokerHold, number: 3, key: keeper.Key{1}},
	{kind: wire.BrokerRelease, number: 4, key: keeper.Key{1}},
	{kind: wire.BrokerRemove, number: 5, name: "ü", version: 1},
	{kind: wire.BrokerList, number: 6},
	{kind: wire.BrokerAwait, number: 7, name: "w"},
	{kind: wire.BrokerCancel, number: 7},
	{kind: wire.BrokerAsk, number: 8},
	{kind: wire.BrokerKeep, number: 9, key: keeper.Key{1}, name: "w", device: cuda.UUID{2}, bytes: 3},
}

var listing = Listing{Name: "w", Version: 3, Device: cuda.UUID{9}, Bytes: 4, Holders: 5, HeldBy: []peer.Credentials{{PID: 6, UID: 7, GID: 8}, {PID: 9, UID: 10, GID: 11}}, Ephemeral: true, PID: 6, UID: 7, Since: time.Unix(0, 8)}

var replies = []reply{
	{kind: wire.BrokerDone, number: 1, version: 9},
	{kind: wire.BrokerDenied, number: 2, status: 1, reason: "no"},
	{kind: wire.BrokerObject, number: 3, key: keeper.Key{1}, objects: []Listing{listing}},
	{kind: wire.BrokerListing, number: 4, objects: []Listing{listing, listing}, last: true},
	{kind: wire.BrokerListing, number: 4, objects: []Listing{}},
	{kind: wire.BrokerWanted, key: keeper.Key{1}},
	{kind: wire.BrokerStatus, number: 5, health: Status{Ready: true, Since: time.Unix(0, 9), Clients: 1, Objects: 2, Publications: 9, Writing: 3, Bytes: 4, Limit: 5, Commits: 6, Attaches: 7, Refusals: 8}},
}

func TestMessagesCrossTheConnection(t *testing.T) {
	for _, want := range requests {
		got, err := parseRequest(want.pack())
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for _, want := range replies {
		got, err := parseReply(want.pack())
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
}

func TestMessagesThatBreakTheProtocol(t *testing.T) {
	f, err := exchange.TextFile("test", "a manifest", nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	bad := func(r request, change func(m *peer.Message)) peer.Message {
		m := r.pack()
		if change != nil {
			change(&m)
		}
		return m
	}
	create, key := requests[0], requests[2]
	none, huge, nameless, zero := create, create, create, key
	none.bytes, huge.bytes, nameless.name, zero.key = 0, maxBytes+1, "", keeper.Key{}
	for name, m := range map[string]peer.Message{
		"an unknown kind":         {Kind: 7},
		"no bytes":                bad(none, nil),
		"too many bytes":          bad(huge, nil),
		"no name":                 bad(nameless, nil),
		"the counter's key":       bad(zero, nil),
		"cut short":               bad(create, func(m *peer.Message) { m.Body = m.Body[:len(m.Body)-1] }),
		"too long":                bad(create, func(m *peer.Message) { m.Body = append(m.Body, 0) }),
		"no bool":                 bad(create, func(m *peer.Message) { m.Body[len(m.Body)-1] = 2 }),
		"a file":                  bad(key, func(m *peer.Message) { m.FDs = []*peer.FD{f} }),
		"a commit without a file": bad(request{kind: wire.BrokerCommit, key: keeper.Key{1}}, nil),
		"a commit with two files": bad(request{kind: wire.BrokerCommit, key: keeper.Key{1}}, func(m *peer.Message) { m.FDs = []*peer.FD{f, f} }),
	} {
		_, err := parseRequest(m)
		require.ErrorIs(t, err, peer.ErrProtocol, name)
	}
	object := replies[2]
	for name, m := range map[string]peer.Message{
		"an unknown kind": {Kind: 7},
		"two files":       func() peer.Message { m := object.pack(); m.FDs = []*peer.FD{f, f}; return m }(),
		"a file":          func() peer.Message { m := replies[0].pack(); m.FDs = []*peer.FD{f}; return m }(),
		"cut short":       func() peer.Message { m := replies[3].pack(); m.Body = m.Body[:len(m.Body)-1]; return m }(),
	} {
		_, err := parseReply(m)
		require.ErrorIs(t, err, peer.ErrProtocol, name)
	}
}

// Whatever a peer sends is refused, or is a message that means the same when it is sent on: every kind there is, with
// and without files.
func FuzzMessages(f *testing.F) {
	known := map[uint16]bool{}
	add := func(m peer.Message) {
		known[m.Kind] = true
		f.Add(m.Kind, m.Body, uint8(len(m.FDs)))
	}
	for _, r := range append(requests, request{kind: wire.BrokerCommit, number: 1, key: keeper.Key{1}, manifest: &peer.FD{}}) {
		add(r.pack())
	}
	for _, r := range append(replies, reply{kind: wire.BrokerObject, number: 3, objects: []Listing{listing}, beside: &peer.FD{}}) {
		add(r.pack())
	}
	for kind := range fields {
		require.True(f, known[kind], "a seed of kind %#x", kind)
	}
	for kind := wire.BrokerDone; kind <= wire.BrokerStatus; kind++ {
		require.True(f, known[kind], "a seed of kind %#x", kind)
	}
	f.Fuzz(func(t *testing.T, kind uint16, body []byte, files uint8) {
		m := peer.Message{Kind: kind, Body: body, FDs: make([]*peer.FD, files%4)}
		for i := range m.FDs {
			m.FDs[i] = &peer.FD{}
		}
		if r, err := parseRequest(m); err == nil {
			again, err := parseRequest(r.pack())
			require.NoError(t, err)
			require.Equal(t, r, again)
		}
		if r, err := parseReply(m); err == nil {
			again, err := parseReply(r.pack())
			require.NoError(t, err)
			require.Equal(t, r, again)
		}
	})
}
