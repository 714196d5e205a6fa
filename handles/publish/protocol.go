package publish

import (
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"math"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// The messages between a server and a client, on a connection that carries nothing
// else. All values are little-endian, texts are UTF-8 behind their length in 16 bits,
// and every message has exactly one form.
//
//	to the server
//	  list     number                    requests the listing
//	  follow   number, access, room, name, and what a follower that comes back has
//	                                     requests views of it from now on
//	  done     token, serial, status, chunks, reason
//	                                     acknowledges a view
//	  leave    token                     ends a follower
//	to the client
//	  listing  number, entries           replies to list
//	  accepted number, token, publication, reserved, slot, descriptor, tag, and
//	           form and digest of the description, heir, kept, and files: the page, and
//	           the description if there is one
//	                                     replies to follow
//	  denied   number, status, reason    replies to list or follow
//	  view     token, serial, generation, state, ordered, length, keep, flags, status,
//	           reason, chunks, and a file for each chunk
//	                                     the view of this generation is ...
//
// A number is the client's, and matches replies to requests. A token names one follower
// of one publication: 128 random bits, which are worth nothing on another connection. A
// view that describes memory is an update here, and a follower's last view, which has
// none, an end. docs/protocol.md is the specification.
const (
	// MaxName is the longest name of a publication, in bytes.
	MaxName = 255
	// maxTag is the longest tag, in bytes.
	maxTag = 128
	// maxPublications keeps a listing within a message.
	maxPublications = 2048
)

// token names a follower of a publication.
type token [16]byte

func newToken() (t token) {
	_, _ = rand.Read(t[:]) // never fails
	return t
}

// identity names a publication: 128 random bits, which stay when another process
// takes the publication over.
type identity [16]byte

func newIdentity() (i identity) {
	_, _ = rand.Read(i[:]) // never fails
	return i
}

// status says how something ended.
type status uint8

const (
	statusOK status = iota
	// statusUnknown: no such name or token.
	statusUnknown
	// statusLimit: a limit of the server.
	statusLimit
	// statusWithdrawn: the publication is over.
	statusWithdrawn
	// statusLeft: the client left.
	statusLeft
	// statusForbidden: more access than the client may have.
	statusForbidden
	// statusFailed: anything else; the reason says what.
	statusFailed
	// statusExcluded: the follower read for too long.
	statusExcluded
	statuses
)

// message is one of those below.
type message interface {
	kind() uint16
	encode(e *wire.Encoder)
}

type list struct{ number uint32 }

// follow requests a publication by its name. room is the follower's address space in
// bytes, 0 for as much as the publisher has.
type follow struct {
	number uint32
	access Access // to map it with
	room   uint64
	name   string
	has    possession
}

// possession is what a follower that comes back has of a publication; the zero value
// is nothing.
type possession struct {
	publication identity
	generation  uint64
	length      uint64
	chunks      []uint64 // identities
}

// done acknowledges a view: it was carried out, or refused for a reason. chunks counts
// what the follower has mapped then.
type done struct {
	token  token
	serial uint64
	status status
	chunks uint32
	reason string
}

type leave struct{ token token }

// entry is a publication in a listing.
type entry struct {
	name       string
	kind       handles.Kind
	access     Access // that the client may have
	element    handles.ElementType
	size       uint32 // of an element
	length     uint64
	bytes      uint64
	generation uint64
	identity   identity
	tag        cuda.Tag
	digest     [sha256.Size]byte // of the description; zero if there is none
}

type listing struct {
	number  uint32
	entries []entry
}

// accepted replies to follow. reserved is how far the publication can grow, in bytes;
// slot is the follower's word of the page; the descriptor has no chunks and no length.
type accepted struct {
	number   uint32
	token    token
	identity identity // of the publication
	reserved uint64
	slot     uint32
	about    handles.Descriptor
	tag      cuda.Tag
	described
	heir bool // it may take the publication over though it only reads
	kept bool // none may: a broker keeps the memory for the next publisher
}

type denied struct {
	number uint32
	status status
	reason string
}

// State is the state of a publication, as a follower sees it.
type State uint8

// The values are part of the protocol.
const (
	// Live: the publisher may announce more.
	Live State = iota + 1
	// Stale: the elements that are shown stay. At present there is no publisher that
	// could announce more.
	Stale
	// Suspended: the memory is away. No element is shown until the publisher brings
	// it back; addresses stay.
	Suspended
	// Moved: this publisher has ended. Another one continues the publication at the
	// same socket, or will.
	Moved
	// Ended: nothing more is announced.
	Ended
	states
)

// String returns the state's name, such as "live".
func (s State) String() string {
	if s >= Live && s < states {
		return [...]string{"live", "stale", "suspended", "moved", "ended"}[s-Live]
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// update is a view of memory: a step of a follower towards what is published. The
// follower keeps the first keep of its chunks, and maps new ones behind them. An update
// either takes chunks away or adds some. After one with last set, the follower is at the
// generation and the length, whose bytes are complete when the word has reached ordered.
// With over set it is not, because its room does not hold the length. The state is Live,
// Stale, or Suspended, which keeps nothing.
type update struct {
	token      token
	serial     uint64
	generation uint64
	state      State
	ordered    uint64
	length     uint64
	keep       uint32
	last, over bool
	chunks     []chunk
}

// ended is the last view of a follower, Moved or Ended, which is not acknowledged.
// The status of one that moved is statusOK.
type ended struct {
	token      token
	generation uint64
	state      State
	status     status
	reason     string
}

func (m *list) kind() uint16     { return wire.List }
func (m *follow) kind() uint16   { return wire.Follow }
func (m *done) kind() uint16     { return wire.Done }
func (m *leave) kind() uint16    { return wire.Leave }
func (m *listing) kind() uint16  { return wire.Listing }
func (m *accepted) kind() uint16 { return wire.Accepted }
func (m *denied) kind() uint16   { return wire.Denied }
func (m *update) kind() uint16   { return wire.View }
func (m *ended) kind() uint16    { return wire.View }

func (m *list) encode(e *wire.Encoder) { e.Uint32(m.number) }

func (m *follow) encode(e *wire.Encoder) {
	e.Uint32(m.number)
	e.Uint8(uint8(m.access))
	e.Uint64(m.room)
	e.Raw(m.has.publication[:])
	e.Uint64(m.has.generation)
	e.Uint64(m.has.length)
	e.Uint32(uint32(len(m.has.chunks)))
	for _, id := range m.has.chunks {
		e.Uint64(id)
	}
	e.Text(m.name, MaxName)
}

func (m *done) encode(e *wire.Encoder) {
	e.Raw(m.token[:])
	e.Uint64(m.serial)
	e.Uint8(uint8(m.status))
	e.Uint32(m.chunks)
	e.Text(m.reason, wire.MaxReason)
}

func (m *leave) encode(e *wire.Encoder) { e.Raw(m.token[:]) }

func (m *listing) encode(e *wire.Encoder) {
	e.Uint32(m.number)
	e.Uint32(uint32(len(m.entries)))
	for _, i := range m.entries {
		e.Text(i.name, MaxName)
		e.Uint8(uint8(i.kind))
		e.Uint8(uint8(i.access))
		e.Uint8(uint8(i.element))
		e.Uint32(i.size)
		e.Uint64(i.length)
		e.Uint64(i.bytes)
		e.Uint64(i.generation)
		e.Raw(i.identity[:])
		e.Text(string(i.tag), maxTag)
		e.Raw(i.digest[:])
	}
}

func (m *accepted) encode(e *wire.Encoder) {
	e.Uint32(m.number)
	e.Raw(m.token[:])
	e.Raw(m.identity[:])
	e.Uint64(m.reserved)
	e.Uint32(m.slot)
	about, err := m.about.MarshalBinary()
	if err != nil {
		panic(fmt.Sprintf("publish: a publication's own descriptor: %v", err))
	}
	e.Blob(about)
	e.Text(string(m.tag), maxTag)
	e.Uint8(uint8(m.form))
	e.Raw(m.digest[:])
	e.Bool(m.heir)
	e.Bool(m.kept)
}

func (m *denied) encode(e *wire.Encoder) {
	e.Uint32(m.number)
	e.Uint8(uint8(m.status))
	e.Text(m.reason, wire.MaxReason)
}

func (m *update) encode(e *wire.Encoder) {
	e.Raw(m.token[:])
	e.Uint64(m.serial)
	e.Uint64(m.generation)
	e.Uint8(uint8(m.state))
	e.Uint64(m.ordered)
	e.Uint64(m.length)
	e.Uint32(m.keep)
	e.Bool(m.last)
	e.Bool(m.over)
	e.Uint8(uint8(statusOK))
	e.Text("", wire.MaxReason)
	e.Uint32(uint32(len(m.chunks)))
	for _, c := range m.chunks {
		e.Uint64(c.id)
		e.Uint64(c.size)
	}
}

func (m *ended) encode(e *wire.Encoder) {
	e.Raw(m.token[:])
	e.Uint64(0)
	e.Uint64(m.generation)
	e.Uint8(uint8(m.state))
	e.Uint64(0)
	e.Uint64(0)
	e.Uint32(0)
	e.Bool(true)
	e.Bool(false)
	e.Uint8(uint8(m.status))
	e.Text(m.reason, wire.MaxReason)
	e.Uint32(0)
}

// view reads a view, which is an update or an end.
func (d *decoder) view() message {
	u := &update{token: d.token(), serial: d.Uint64(), generation: d.Uint64(), state: State(d.Uint8()), ordered: d.Uint64(), length: d.size(),
		keep: d.Uint32(), last: d.Bool(), over: d.Bool()}
	status, reason := d.status(), d.Text(wire.MaxReason)
	for range d.Count(chunkBytes, wire.MaxBatch) {
		u.chunks = append(u.chunks, chunk{d.Uint64(), d.size()})
	}
	memory := u.length != 0 || u.keep != 0 || len(u.chunks) > 0
	switch {
	case u.state < Live || u.state >= states:
		d.Fail("state %d", u.state)
	case u.state == Moved || u.state == Ended:
		if u.serial != 0 || u.ordered != 0 || memory || !u.last || u.over || (u.state == Moved) != (status == statusOK) {
			d.Fail("a last view with a serial, memory, or status %d", status)
		}
		return &ended{u.token, u.generation, u.state, status, reason}
	case status != statusOK || reason != "":
		d.Fail("status %d of a view in state %v", status, u.state)
	case u.state == Suspended && (memory || !u.last || u.over):
		d.Fail("a suspended view with memory")
	}
	return u
}

// chunkBytes is the size of a chunk in a message.
const chunkBytes = 2 * 8

// entryBytes is the least size of an entry.
const entryBytes = 2 + 1 + 1 + 1 + 4 + 3*8 + 16 + 2 + sha256.Size

// toServer reads a message to a server, which brings no files.
func toServer(kind uint16, body []byte, files int) (message, error) {
	d := decoder{wire.Decoder{B: body}}
	var m message
	switch kind {
	case wire.List:
		m = &list{number: d.Uint32()}
	case wire.Follow:
		f := &follow{number: d.Uint32(), access: d.access(), room: d.size()}
		f.has = possession{publication: d.identity(), generation: d.Uint64(), length: d.size()}
		for range d.Count(8, handles.MaxChunks) {
			f.has.chunks = append(f.has.chunks, d.Uint64())
		}
		f.name = d.Text(MaxName)
		if d.Err() == nil && f.name == "" {
			d.Fail("an empty name")
		}
		m = f
	case wire.Done:
		m = &done{d.token(), d.Uint64(), d.status(), d.Uint32(), d.Text(wire.MaxReason)}
	case wire.Leave:
		m = &leave{d.token()}
	default:
		return nil, errs.Violation("a message of kind %#x, which no client sends", kind)
	}
	if err := d.End(); err != nil {
		return nil, errs.Violation("a message of kind %#x: %v", kind, err)
	}
	if files != 0 {
		return nil, errs.Violation("a message of kind %#x with %s", kind, errs.Count(files, "file descriptor"))
	}
	return m, nil
}

// toClient reads a message to a client.
func toClient(kind uint16, body []byte, files int) (message, error) {
	d := decoder{wire.Decoder{B: body}}
	var m message
	want := 0
	switch kind {
	case wire.Listing:
		l := &listing{number: d.Uint32()}
		for range d.Count(entryBytes, maxPublications) {
			l.entries = append(l.entries, entry{d.Text(MaxName), handles.Kind(d.Uint8()), d.access(), handles.ElementType(d.Uint8()), d.Uint32(), d.size(), d.size(), d.Uint64(), d.identity(), d.tag(), d.digest()})
		}
		m = l
	case wire.Accepted:
		a := &accepted{number: d.Uint32(), token: d.token(), identity: d.identity(), reserved: d.size(), slot: d.Uint32()}
		if about := d.Blob(wire.DescriptorHeader); d.Err() == nil {
			if err := a.about.UnmarshalBinary(about); err != nil {
				d.Fail("%w", err)
			}
		}
		a.tag, a.described = d.tag(), described{form(d.Uint8()), d.digest()}
		a.heir, a.kept = d.Bool(), d.Bool()
		none := a.form == noDescription
		if a.form >= forms || none && a.digest != [sha256.Size]byte{} {
			d.Fail("a digest of a description of form %d", a.form)
		}
		if m, want = a, 2; none {
			want = 1
		}
	case wire.Denied:
		m = &denied{d.Uint32(), d.status(), d.Text(wire.MaxReason)}
	case wire.View:
		if m = d.view(); d.Err() == nil {
			if u, ok := m.(*update); ok {
				want = len(u.chunks)
			}
		}
	default:
		return nil, errs.Violation("a message of kind %#x, which no server sends", kind)
	}
	if err := d.End(); err != nil {
		return nil, errs.Violation("a message of kind %#x: %v", kind, err)
	}
	if files != want {
		return nil, errs.Violation("a message of kind %#x with %s instead of %d", kind, errs.Count(files, "file descriptor"), want)
	}
	return m, nil
}

// decoder adds the values of this protocol.
type decoder struct{ wire.Decoder }

func (d *decoder) token() (t token) {
	copy(t[:], d.Raw(len(t)))
	return t
}

// size reads bytes or elements, which fit into an int.
func (d *decoder) size() uint64 {
	v := d.Uint64()
	if v > math.MaxInt64 {
		d.Fail("a size of %d", v)
	}
	return v
}

func (d *decoder) identity() identity { return identity(d.token()) }

func (d *decoder) tag() cuda.Tag { return cuda.Tag(d.Text(maxTag)) }

func (d *decoder) digest() (sum [sha256.Size]byte) {
	copy(sum[:], d.Raw(len(sum)))
	return sum
}

func (d *decoder) status() status {
	s := status(d.Uint8())
	if s >= statuses {
		d.Fail("status %d", s)
	}
	return s
}

// access reads an access that is requested or granted, which is never NoAccess.
func (d *decoder) access() Access {
	a := Access(d.Uint8())
	if d.Err() == nil && (a < ReadAccess || a > WriteAccess) {
		d.Fail("access %d", a)
	}
	return a
}

// pack encodes a message.
func pack(m message, files ...*peer.FD) peer.Message {
	var e wire.Encoder
	m.encode(&e)
	return peer.Message{Kind: m.kind(), Body: e.B, FDs: files}
}
