//go:build linux

package handles

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// vectors are those of testdata/protocol.json, which any language can read.
type vectors struct {
	Messages []struct {
		Message, To string
		Kind        uint16
		Files       int
		Layout      layout
		Fields      fields
		Body        string
	}
	Packets []struct {
		Packet string
		Layout layout
		Fields fields
		Packed string
	}
	Descriptor struct {
		Layout layout
		Fields fields
		Packed string
	}
}

type (
	layout []fieldForm
	fields map[string]any
)

// fieldForm is a field's name, and the name of its type or the layout of what a
// list has.
type fieldForm struct {
	name, kind string
	list       layout
}

func (f *fieldForm) UnmarshalJSON(b []byte) error {
	var pair []json.RawMessage
	if err := json.Unmarshal(b, &pair); err != nil || len(pair) != 2 {
		return fmt.Errorf("a field %s: %w", b, err)
	}
	if err := json.Unmarshal(pair[0], &f.name); err != nil {
		return err
	}
	if json.Unmarshal(pair[1], &f.kind) == nil {
		return nil
	}
	return json.Unmarshal(pair[1], &f.list)
}

func (l layout) String() string {
	var all []string
	for _, f := range l {
		if f.list != nil {
			f.kind = "(" + f.list.String() + ")"
		}
		all = append(all, f.name+" "+f.kind)
	}
	return strings.Join(all, ", ")
}

// encode is written from docs/protocol.md alone.
func (l layout) encode(t *testing.T, values fields) (b []byte) {
	t.Helper()
	le := binary.LittleEndian
	raw := func(v any) []byte {
		b, err := hex.DecodeString(v.(string))
		require.NoError(t, err)
		return b
	}
	number := func(v any) uint64 {
		switch v := v.(type) {
		case bool:
			return map[bool]uint64{true: 1}[v]
		case json.Number:
			n, err := v.Int64()
			require.NoError(t, err)
			return uint64(n)
		}
		require.Fail(t, "no number", "%v", v)
		return 0
	}
	for _, f := range l {
		v, there := values[f.name]
		require.True(t, there, f.name)
		switch f.kind {
		case "u8", "bool":
			b = append(b, byte(number(v)))
		case "u16":
			b = le.AppendUint16(b, uint16(number(v)))
		case "u32":
			b = le.AppendUint32(b, uint32(number(v)))
		case "u64":
			b = le.AppendUint64(b, number(v))
		case "16 bytes", "bytes":
			b = append(b, raw(v)...)
		case "text":
			b = append(le.AppendUint16(b, uint16(len(v.(string)))), v.(string)...)
		case "blob":
			b = append(le.AppendUint32(b, uint32(len(raw(v)))), raw(v)...)
		case "rest":
			b = append(b, v.(string)...)
		case "":
			all := v.([]any)
			b = le.AppendUint32(b, uint32(len(all)))
			for _, one := range all {
				b = append(b, f.list.encode(t, one.(map[string]any))...)
			}
		default:
			require.Fail(t, "unknown type", f.kind)
		}
	}
	return b
}

func readVectors(t *testing.T) (v vectors) {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", "protocol.json"))
	require.NoError(t, err)
	defer f.Close()
	d := json.NewDecoder(f)
	d.UseNumber()
	require.NoError(t, d.Decode(&v))
	return v
}

// What the vectors say, the document says, and this package writes and reads.
func TestMessagesAreThoseOfTheVectors(t *testing.T) {
	document, err := os.ReadFile(filepath.Join("..", "docs", "protocol.md"))
	if _, here := os.Stat("vectors_test.go"); here == nil { // a test binary elsewhere has no documents
		require.NoError(t, err)
	}
	kinds := map[uint16]bool{}
	for _, v := range readVectors(t).Messages {
		t.Run(v.Message, func(t *testing.T) {
			kinds[v.Kind] = true
			form := v.Layout.String()
			if form == "" {
				form = "(empty)"
			}
			row := fmt.Sprintf("| 0x%04x | %s | %s | %s |", v.Kind, v.Message, v.To, form)
			if document != nil && !strings.Contains(string(document), row) {
				t.Errorf("docs/protocol.md has no row %s", row)
			}
			body, err := hex.DecodeString(v.Body)
			require.NoError(t, err)
			require.Equal(t, v.Body, hex.EncodeToString(v.Layout.encode(t, v.Fields)), "the document's form")
			if v.Kind > MaxKind {
				m := Message{Kind: v.Kind, Body: body, FDs: make([]*FD, v.Files)}
				if v.Kind == soonKind {
					require.Empty(t, body)
					return
				}
				n, err := transferOf(m)
				require.NoError(t, err)
				require.EqualValues(t, 1, n)
				require.Equal(t, v.Body, hex.EncodeToString(rewritten(t, m).Body))
				return
			}
			said, err := readAny(v.Kind, body, v.Files)
			require.NoError(t, err)
			require.Equal(t, v.Body, hex.EncodeToString(pack(said).Body))
			require.Equal(t, v.Kind, said.kind())
		})
	}
	for _, m := range said {
		require.True(t, kinds[m.kind()], "%T has no vector", m)
	}
	for k := offerKind; k <= lastKind; k++ {
		require.True(t, kinds[k], "kind %#x has no vector", k)
	}
}

// rewritten reads a message of a transfer and writes it again.
func rewritten(t *testing.T, m Message) Message {
	t.Helper()
	n, err := transferOf(m)
	require.NoError(t, err)
	switch m.Kind {
	case offerKind:
		who, d, err := parseOffer(m)
		require.NoError(t, err)
		back, err := offerMessage(n, who, &d)
		require.NoError(t, err)
		return back
	case chunksKind, takenKind:
		return countMessage(m.Kind, n, int(countOf(m)))
	case fabricKind:
		back := countMessage(m.Kind, n, int(countOf(m)))
		back.Body = append(back.Body, m.Body[transferHeader+4:]...)
		return back
	case withdrawnKind, declinedKind, byFDKind:
		return reasonMessage(m.Kind, n, fmt.Errorf("%s", textOf(m)))
	}
	return transferMessage(m.Kind, n)
}

func TestPacketsAreThoseOfTheVectors(t *testing.T) {
	v := readVectors(t)
	var packets [][]byte
	for _, p := range v.Packets {
		b := p.Layout.encode(t, p.Fields)
		require.Equal(t, p.Packed, hex.EncodeToString(b), p.Packet)
		packets = append(packets, b)
	}
	require.Equal(t, v.Packets[0].Packed, hex.EncodeToString(greeting(sender, ownVersions)))
	in := &inbound{own: receiver, versions: ownVersions, maxFDs: 8}
	for i, p := range packets[:3] {
		m, err := in.take(p, someFDs(t, min(i, 1)), false)
		require.NoError(t, err)
		require.Equal(t, i == 2, m != nil)
		if m != nil {
			require.Equal(t, "abcdef", string(m.Body))
			require.Len(t, m.FDs, 2)
			require.NoError(t, m.Close())
		}
	}
	_, err := in.take(packets[3], nil, false)
	require.ErrorIs(t, err, ErrRefused)
	out := &outbound{version: latestVersion, peer: receiver, sequence: 1}
	p, body, with := out.packet(nil, &Message{Kind: 5, Body: []byte("abcd"), FDs: make([]*FD, 1)}, 0, 0, 1)
	require.Len(t, p, packetHeader+4)
	require.Equal(t, []int{4, 1}, []int{body, with})
	require.Equal(t, packets[1][:28], p[:28], "all but what the whole message has")
}

func TestDescriptorsAreThoseOfTheVectors(t *testing.T) {
	v := readVectors(t).Descriptor
	b := v.Layout.encode(t, v.Fields)
	require.Equal(t, v.Packed, hex.EncodeToString(b))
	var d Descriptor
	require.NoError(t, d.UnmarshalBinary(b))
	back, err := d.MarshalBinary()
	require.NoError(t, err)
	require.Equal(t, b, back)
	require.EqualValues(t, 1000, d.Length)
	require.Equal(t, []uint64{2 << 20, 4 << 20}, d.Chunks)
}
