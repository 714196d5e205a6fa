package publish

import (
	"math"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

var float32s = handles.Descriptor{Kind: handles.ArrayKind, Element: handles.Float32, ElementSize: 4,
	Location: cuda.OnDevice(1), Device: cuda.UUID{11}, Handle: vmm.PosixFD, Exporter: handles.Process{PID: 12, Instance: [16]byte{13}}}

// said is one of each message.
var said = []message{
	&list{1},
	&follow{number: 2, access: ReadAccess, room: 1 << 30, name: "weights"},
	&follow{number: 2, access: ReadAccess, room: 1 << 30, name: "weights", has: possession{identity{3}, 4, 5, []uint64{6, 7}}},
	&done{token{3}, 4, statusFailed, 5, "no room"},
	&leave{token{6}},
	&listing{7, []entry{{"weights", handles.ArrayKind, WriteAccess, handles.Float32, 4, 1000, 2 << 20, 8, identity{9}, "model", [32]byte{1}}, {"größe", handles.BufferKind, ReadAccess, handles.NoElement, 0, 0, 0, 0, identity{}, "", [32]byte{}}}},
	&accepted{9, token{10}, identity{9}, 1 << 40, 11, float32s, "", described{}, false, true},
	&accepted{9, token{10}, identity{9}, 1 << 40, 11, float32s, "größe", described{manifestForm, [32]byte{14}}, true, false},
	&denied{14, statusUnknown, "no such name"},
	&update{token{15}, 16, 17, Live, 16, 18, 1, true, false, []chunk{{21, 2 << 20}, {22, 4 << 20}}},
	&update{token{15}, 16, 17, Stale, 16, 18, 1, true, true, nil},
	&update{token{15}, 16, 17, Suspended, 16, 0, 0, true, false, nil},
	&ended{token{19}, 17, Ended, statusWithdrawn, ""},
	&ended{token{19}, 17, Moved, statusOK, "another process has it"},
}

func files(m message) int {
	switch m := m.(type) {
	case *accepted:
		if m.form != noDescription {
			return 2
		}
		return 1
	case *update:
		return len(m.chunks)
	}
	return 0
}

// readAny reads a message of either side.
func readAny(kind uint16, body []byte, files int) (message, error) {
	if kind < wire.Listing {
		return toServer(kind, body, files)
	}
	return toClient(kind, body, files)
}

func TestMessagesOfPublishingHaveOneForm(t *testing.T) {
	for _, m := range said {
		p := pack(m)
		back, err := readAny(p.Kind, p.Body, files(m))
		require.NoError(t, err)
		require.Equal(t, m, back)
		for n := range p.Body {
			_, err := readAny(p.Kind, p.Body[:n], files(m))
			require.ErrorIs(t, err, peer.ErrProtocol, "%T cut to %d bytes", m, n)
		}
		_, err = readAny(p.Kind, append(p.Body, 0), files(m))
		require.ErrorIs(t, err, peer.ErrProtocol, "%T with a byte too many", m)
		_, err = readAny(p.Kind, p.Body, files(m)+1)
		require.ErrorIs(t, err, peer.ErrProtocol, "%T with a file too many", m)
	}
}

func TestMessagesOfPublishingAreBounded(t *testing.T) {
	long := strings.Repeat("ä", 1000)
	p := pack(&denied{1, statusFailed, long})
	back, err := toClient(p.Kind, p.Body, 0)
	require.NoError(t, err)
	require.LessOrEqual(t, len(back.(*denied).reason), wire.MaxReason)
	require.True(t, strings.HasPrefix(long, back.(*denied).reason))

	var entries []entry
	for range maxPublications {
		entries = append(entries, entry{name: strings.Repeat("n", MaxName)})
	}
	require.Less(t, len(pack(&listing{1, entries}).Body), peer.MaxBody, "a listing fits into a message")
	for _, row := range []struct {
		what string
		m    message
	}{
		{"too many entries", &listing{1, append(entries, entry{name: "x"})}},
		{"too many chunks", &update{state: Live, last: true, chunks: make([]chunk, wire.MaxBatch+1)}},
		{"no name", &follow{number: 1, access: WriteAccess, name: ""}},
		{"an unknown status", &denied{1, statuses, ""}},
		{"an unknown state", &update{state: states, last: true}},
		{"no state", &update{last: true}},
		{"a suspended view that keeps memory", &update{state: Suspended, keep: 1, last: true}},
		{"a suspended view that goes on", &update{state: Suspended}},
		{"an end that shows elements", &update{state: Ended, length: 1, last: true}},
		{"an end with a serial", &update{state: Ended, serial: 1, last: true}},
		{"an end without a reason", &ended{state: Ended}},
		{"a move that failed", &ended{state: Moved, status: statusFailed}},
	} {
		p := pack(row.m)
		_, err := readAny(p.Kind, p.Body, files(row.m))
		require.ErrorIs(t, err, peer.ErrProtocol, row.what)
	}
	for _, body := range [][]byte{nil, {1}, []byte(strings.Repeat("\xff", 200))} {
		for _, kind := range []uint16{1, wire.List - 1, wire.Leave + 1, wire.Listing, wire.View, wire.View + 1, peer.MaxKind, math.MaxUint16} {
			_, err := toServer(kind, body, 0)
			require.ErrorIs(t, err, peer.ErrProtocol)
			_, err = toClient(kind, body, 0)
			require.ErrorIs(t, err, peer.ErrProtocol)
		}
	}
}

// Whatever is taken is the one form of what it says.
func FuzzMessagesOfPublishing(f *testing.F) {
	for _, m := range said {
		p := pack(m)
		f.Add(p.Kind, p.Body, files(m))
	}
	f.Fuzz(func(t *testing.T, kind uint16, body []byte, files int) {
		for _, read := range []func(uint16, []byte, int) (message, error){toServer, toClient} {
			m, err := read(kind, body, files)
			if err != nil {
				require.ErrorIs(t, err, peer.ErrProtocol)
				continue
			}
			p := pack(m)
			require.Equal(t, kind, p.Kind)
			require.Equal(t, body, p.Body)
		}
	})
}

// A size or a length that is no int is a violation, whichever message has it.
func TestSizesBeyondAnInt(t *testing.T) {
	const far = 1 << 63
	about := handles.Descriptor{Kind: handles.BufferKind, Location: cuda.OnHostNUMA(0), Handle: vmm.PosixFD}
	for name, m := range map[string]message{
		"room":        &follow{access: ReadAccess, room: far, name: "x"},
		"a length":    &follow{access: ReadAccess, name: "x", has: possession{length: far}},
		"an entry":    &listing{entries: []entry{{name: "x", access: ReadAccess, length: far}}},
		"its bytes":   &listing{entries: []entry{{name: "x", access: ReadAccess, bytes: far}}},
		"reserved":    &accepted{reserved: far, about: about},
		"a view":      &update{state: Live, length: far, last: true},
		"its chunk":   &update{state: Live, chunks: []chunk{{1, far}}, last: true},
		"a last view": &update{state: Suspended, length: far, last: true},
	} {
		p := pack(m)
		read, files := toClient, 0
		if m.kind() == wire.Follow {
			read = toServer
		}
		if u, ok := m.(*update); ok {
			files = len(u.chunks)
		} else if m.kind() == wire.Accepted {
			files = 1
		}
		_, err := read(p.Kind, p.Body, files)
		require.ErrorIs(t, err, peer.ErrProtocol, name)
		require.ErrorContains(t, err, "a size of 9223372036854775808", name)
	}
}
