// Package vectors reads the test vectors of the protocol, which any language can read:
// one example of every message and packet (testdata/protocol.json), which it encodes
// from docs/protocol.md alone, messages and transfers that every implementation refuses
// (testdata/hostile.json), and texts of manifests (testdata/manifests.json).
package vectors

import (
	"bytes"
	_ "embed"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

//go:embed testdata/protocol.json
var file []byte

//go:embed testdata/hostile.json
var hostile []byte

//go:embed testdata/manifests.json
var manifests []byte

// Vectors are all test vectors.
type Vectors struct {
	Messages []Message
	// Groups are the messages between the processes of a group.
	Groups []Message
	// Objects are the messages between a broker and its clients.
	Objects []Message
	Packets []struct {
		Packet string
		Layout Layout
		Fields Fields
		Packed string
	}
	Descriptor struct {
		Layout Layout
		Fields Fields
		Packed string
	}
}

// Message is an example of a message, with its body in hexadecimal.
type Message struct {
	Message, To string
	Kind        uint16
	Files       int
	Layout      Layout
	Fields      Fields
	Body        string
}

type (
	// Layout lists the fields of a message in their order, and Fields has their values.
	Layout []fieldForm
	Fields map[string]any
)

// fieldForm is a field's name, and the name of its type or the layout of its list's
// entries.
type fieldForm struct {
	name, kind string
	list       Layout
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

func (l Layout) String() string {
	var all []string
	for _, f := range l {
		if f.list != nil {
			f.kind = "(" + f.list.String() + ")"
		}
		all = append(all, f.name+" "+f.kind)
	}
	return strings.Join(all, ", ")
}

// Encode encodes values of a layout. It is written from docs/protocol.md alone.
func (l Layout) Encode(t testing.TB, values Fields) (b []byte) {
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
		case "16 bytes", "32 bytes", "bytes":
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
				b = append(b, f.list.Encode(t, one.(map[string]any))...)
			}
		default:
			require.Fail(t, "unknown type", f.kind)
		}
	}
	return b
}

// Number is a number in a message's body: its offset and its size, in bytes.
type Number struct{ At, Size int }

// Numbers returns the numbers of a message whose texts, blobs and lists are empty, their
// lengths included. A list at the end has one entry.
func (l Layout) Numbers() (all []Number) {
	at := 0
	add := func(sizes ...int) {
		for _, size := range sizes {
			all = append(all, Number{at, size})
			at += size
		}
	}
	for i, f := range l {
		switch f.kind {
		case "u8", "bool":
			add(1)
		case "u16", "text":
			add(2)
		case "u32", "blob":
			add(4)
		case "u64":
			add(8)
		case "16 bytes":
			add(8, 8)
		case "32 bytes":
			add(8, 8, 8, 8)
		case "":
			add(4)
			if i == len(l)-1 {
				for _, n := range f.list.Numbers() {
					all = append(all, Number{at + n.At, n.Size})
				}
			}
		}
	}
	return all
}

// Refused is a message that no implementation takes: to a server or client of
// publications, or to a receiver or sender of memory.
type Refused struct {
	Name, To string
	Kind     uint16
	Files    int
	Body     []byte
}

// ReadRefused returns the messages to some sides, and requires that there are any.
func ReadRefused(t testing.TB, to ...string) (all []Refused) {
	t.Helper()
	var table struct {
		Messages []struct {
			Name, To string
			Kind     uint16
			Files    int
			Body     string
		}
	}
	require.NoError(t, json.Unmarshal(hostile, &table))
	for _, m := range table.Messages {
		body, err := hex.DecodeString(m.Body)
		require.NoError(t, err)
		if slices.Contains(to, m.To) {
			all = append(all, Refused{m.Name, m.To, m.Kind, m.Files, body})
		}
	}
	require.NotEmpty(t, all)
	return all
}

// Transfer is a transfer that no sender makes: it offers so many chunks, and sends each part
// when the receiver has replied to the one before.
type Transfer struct {
	Name   string
	Chunks int
	Parts  []struct {
		Message      string
		First, Count int // of the chunks, which are files or fabric handles
	}
	Ends string // by the last part: "transfer", which is declined, or "connection"
}

// ReadTransfers returns the transfers that no sender makes, and requires that there are any.
func ReadTransfers(t testing.TB) []Transfer {
	t.Helper()
	var table struct{ Transfers []Transfer }
	require.NoError(t, json.Unmarshal(hostile, &table))
	require.NotEmpty(t, table.Transfers)
	return table.Transfers
}

// Manifest is the text of a manifest, and its identity in hexadecimal, which is empty if every
// implementation refuses the text.
type Manifest struct{ Name, Text, Identity string }

// ReadManifests returns the manifests, and requires that there are any.
func ReadManifests(t testing.TB) (all []Manifest) {
	t.Helper()
	require.NoError(t, json.Unmarshal(manifests, &all))
	require.NotEmpty(t, all)
	return all
}

// Read returns the vectors.
func Read(t testing.TB) (v Vectors) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(file))
	d.UseNumber()
	require.NoError(t, d.Decode(&v))
	return v
}
