package torch

import (
	"bufio"
	"encoding/binary"
	"strings"
)

// pickler writes the few opcodes of Python's pickle format that snapshots need. Errors of
// its writer are returned by Flush.
type pickler struct {
	w       *bufio.Writer
	memo    int            // number of memoized values
	strings map[string]int // memo index by text
}

func (p *pickler) raw(s string) { _, _ = p.w.WriteString(s) }

// number writes an integer, as short as it can be.
func (p *pickler) number(n uint64) {
	switch {
	case n < 1<<8:
		p.raw("K")
		p.little(n, 1)
	case n < 1<<16:
		p.raw("M")
		p.little(n, 2)
	case n < 1<<31:
		p.raw("J")
		p.little(n, 4)
	case n < 1<<63:
		p.raw("\x8a\x08")
		p.little(n, 8)
	default:
		p.raw("\x8a\x09") // a ninth byte, or it would be negative
		p.little(n, 8)
		p.raw("\x00")
	}
}

func (p *pickler) little(n uint64, bytes int) {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], n)
	_, _ = p.w.Write(b[:bytes])
}

func (p *pickler) boolean(v bool) {
	if v {
		p.raw("\x88")
	} else {
		p.raw("\x89")
	}
}

// text writes a string, in full at its first use.
func (p *pickler) text(s string) {
	s = strings.ToValidUTF8(s, "\uFFFD") // Python reads nothing else
	if at, known := p.strings[s]; known {
		p.get(at)
		return
	}
	p.raw("X")
	p.little(uint64(len(s)), 4)
	p.raw(s + "\x94")
	p.strings[s] = p.memo
	p.memo++
}

func (p *pickler) key(s string) { p.text(s) }

// get writes a memoized value.
func (p *pickler) get(at int) {
	if at < 1<<8 {
		p.raw("h")
		p.little(uint64(at), 1)
		return
	}
	p.raw("j")
	p.little(uint64(at), 4)
}

// dict writes a dictionary, whose keys and values f writes.
func (p *pickler) dict(f func()) {
	p.raw("}(")
	f()
	p.raw("u")
}

// list writes a list.
func (p *pickler) list(items []func()) {
	p.raw("]")
	p.appended(items)
}

// appended appends items to the list on the stack, in batches as Python's pickler does.
func (p *pickler) appended(items []func()) {
	const batch = 1000
	for len(items) > 0 {
		n := min(batch, len(items))
		p.raw("(")
		for _, item := range items[:n] {
			item()
		}
		p.raw("e")
		items = items[n:]
	}
}
