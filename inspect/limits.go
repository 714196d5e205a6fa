package inspect

import (
	"fmt"
	"io"
	"strings"
)

// limits bound a snapshot that another process wrote: its bytes, and the elements of all
// lists of one name together.
type limits struct {
	bytes    int
	elements map[string]int
	// others is for lists of other names.
	others int
}

var (
	// whole is for snapshots. A pool's history has at most 4,194,304 events.
	whole = limits{bytes: 1 << 30, others: 1 << 16, elements: map[string]int{
		"reservations": 1 << 20, "mappings": 1 << 22, "memory": 1 << 22, "buffers": 1 << 20,
		"segments": 1 << 20, "blocks": 1 << 22, "history": 1 << 22, "stacks": 1 << 22,
	}}
	// summary is for snapshots without lists of objects.
	summary = limits{bytes: 16 << 20, others: 1 << 14}
)

// maxDevices bounds a device's ordinal.
const maxDevices = 1 << 10

// bounded reads JSON and fails where it exceeds the limits, before a decoder allocates for
// it: an element of three bytes becomes a struct of hundreds.
type bounded struct {
	r      io.Reader
	limits limits
	read   int
	had    map[string]int // elements by the list's name

	inText, escaped bool
	text            []byte // of the last string, up to maxKey bytes
	key             string // the name before the value that is read
	open            []container
	err             error
}

// maxKey is longer than the names of lists.
const maxKey = 32

// container is a list or object that is still open.
type container struct {
	list bool
	name string
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.err != nil {
		return 0, b.err
	}
	n, err := b.r.Read(p)
	if b.read += n; b.read > b.limits.bytes {
		b.err = fmt.Errorf("it has more than %d bytes", b.limits.bytes)
	}
	for _, c := range p[:n] {
		b.next(c)
	}
	if b.err != nil {
		return 0, b.err
	}
	return n, err
}

// next reads a byte. The decoder rejects what is not JSON.
func (b *bounded) next(c byte) {
	if b.inText {
		switch {
		case b.escaped:
			b.escaped = false
		case c == '\\':
			b.escaped = true
		case c == '"':
			b.inText = false
		}
		if len(b.text) <= maxKey {
			b.text = append(b.text, c)
		}
		return
	}
	switch c {
	case '"':
		b.inText, b.text = true, b.text[:0]
	case ':':
		b.key = strings.TrimSuffix(string(b.text), `"`)
	case '[', '{':
		inner := container{list: c == '[', name: b.key}
		if inner.list {
			b.count(inner.name)
		}
		b.open = append(b.open, inner)
	case ']', '}':
		if len(b.open) > 0 {
			b.open = b.open[:len(b.open)-1]
		}
	case ',':
		if n := len(b.open); n > 0 && b.open[n-1].list {
			b.key = b.open[n-1].name
			b.count(b.key)
		}
	}
}

// count counts an element. A decoder does not tell apart names that differ in case, so
// those count as other lists together.
func (b *bounded) count(name string) {
	most, known := b.limits.elements[name]
	if !known {
		name, most = "", b.limits.others
	}
	if b.had == nil {
		b.had = map[string]int{}
	}
	if b.had[name]++; b.had[name] > most && b.err == nil {
		if name == "" {
			name = "other lists"
		}
		b.err = fmt.Errorf("it has more than %d elements of %s", most, name)
	}
}
