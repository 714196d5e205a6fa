package handles

import (
	"crypto/rand"
	"fmt"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// What a server and a client say to each other, over a [Conn] that carries
// nothing else. All values are little-endian, texts are UTF-8 with their length
// in 16 bits before them, and every message has exactly one form.
//
//	to the server
//	  list     number                    asks what is published
//	  follow   number, access, room, name
//	                                     asks to be told of it from now on
//	  done     token, serial, status, chunks, reason
//	                                     answers an update
//	  leave    token                     wants no more of it
//	to the client
//	  listing  number, entries           answers list
//	  accepted number, token, reserved, slot, descriptor, and a file: the page
//	                                     answers follow
//	  denied   number, status, reason    answers list or follow
//	  update   token, serial, generation, ordered, length, keep, flags, sizes,
//	           and a file for each size  what is new
//	  ended    token, status, reason     nothing more comes of it
//
// A number is the client's, to tell answers apart. A token names one follower
// of one publication: 128 random bits, drawn for it alone and worth nothing on
// another connection.
const (
	listMessage uint16 = 0xf101 + iota
	followMessage
	doneMessage
	leaveMessage
)

const (
	listingMessage uint16 = 0xf181 + iota
	acceptedMessage
	deniedMessage
	updateMessage
	endedMessage
)

const (
	// MaxName is the longest name of a publication, in bytes.
	MaxName = 255
	// maxReason is the longest reason.
	maxReason = 512
	// maxPublications keeps a listing within a message.
	maxPublications = 2048
	// batchChunks is how many chunks an update brings at most: each is a file
	// descriptor, on its way and in the receiver until it is imported.
	batchChunks = 64
)

// token names a follower of a publication.
type token [16]byte

func newToken() (t token) {
	_, _ = rand.Read(t[:]) // never fails
	return t
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
	// statusLeft: as the client wished.
	statusLeft
	// statusForbidden: more access than the client may have.
	statusForbidden
	// statusFailed: anything else; the reason says what.
	statusFailed
	statuses
)

// message is one of those below.
type message interface {
	kind() uint16
	encode(e *encoder)
}

type list struct{ number uint32 }

// follow asks for a publication by its name. room is how many bytes of address
// space the follower has for it, 0 for as many as the publisher has.
type follow struct {
	number uint32
	access Access // that it is to be mapped with
	room   uint64
	name   string
}

// done says that an update was taken, or why it was not. chunks is how many the
// follower has mapped now.
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
	kind       Kind
	access     Access // that the client may have
	element    ElementType
	size       uint32 // of an element
	length     uint64
	bytes      uint64
	generation uint64
}

type listing struct {
	number  uint32
	entries []entry
}

// accepted is the answer to follow. reserved is how far the publication can
// grow, in bytes; slot is the follower's word of the page; the descriptor has no
// chunks and no length.
type accepted struct {
	number   uint32
	token    token
	reserved uint64
	slot     uint32
	about    Descriptor
}

type denied struct {
	number uint32
	status status
	reason string
}

// update brings a follower nearer to what is published. Of the chunks that it
// has it keeps the first keep, and behind those it maps new ones of the sizes.
// Chunks are either taken away or added. With last it is then at the generation
// and the length, whose bytes are there when the word has reached ordered. With
// over it is not, since its room does not hold the length.
type update struct {
	token      token
	serial     uint64
	generation uint64
	ordered    uint64
	length     uint64
	keep       uint32
	last, over bool
	sizes      []uint64
}

type ended struct {
	token  token
	status status
	reason string
}

func (m *list) kind() uint16     { return listMessage }
func (m *follow) kind() uint16   { return followMessage }
func (m *done) kind() uint16     { return doneMessage }
func (m *leave) kind() uint16    { return leaveMessage }
func (m *listing) kind() uint16  { return listingMessage }
func (m *accepted) kind() uint16 { return acceptedMessage }
func (m *denied) kind() uint16   { return deniedMessage }
func (m *update) kind() uint16   { return updateMessage }
func (m *ended) kind() uint16    { return endedMessage }

func (m *list) encode(e *encoder) { e.uint32(m.number) }

func (m *follow) encode(e *encoder) {
	e.uint32(m.number)
	e.uint8(uint8(m.access))
	e.uint64(m.room)
	e.text(m.name, MaxName)
}

func (m *done) encode(e *encoder) {
	e.token(m.token)
	e.uint64(m.serial)
	e.uint8(uint8(m.status))
	e.uint32(m.chunks)
	e.text(m.reason, maxReason)
}

func (m *leave) encode(e *encoder) { e.token(m.token) }

func (m *listing) encode(e *encoder) {
	e.uint32(m.number)
	e.uint32(uint32(len(m.entries)))
	for _, i := range m.entries {
		e.text(i.name, MaxName)
		e.uint8(uint8(i.kind))
		e.uint8(uint8(i.access))
		e.uint8(uint8(i.element))
		e.uint32(i.size)
		e.uint64(i.length)
		e.uint64(i.bytes)
		e.uint64(i.generation)
	}
}

func (m *accepted) encode(e *encoder) {
	e.uint32(m.number)
	e.token(m.token)
	e.uint64(m.reserved)
	e.uint32(m.slot)
	about, err := m.about.MarshalBinary()
	if err != nil {
		panic(fmt.Sprintf("handles: a publication's own descriptor: %v", err))
	}
	e.blob(about)
}

func (m *denied) encode(e *encoder) {
	e.uint32(m.number)
	e.uint8(uint8(m.status))
	e.text(m.reason, maxReason)
}

func (m *update) encode(e *encoder) {
	e.token(m.token)
	e.uint64(m.serial)
	e.uint64(m.generation)
	e.uint64(m.ordered)
	e.uint64(m.length)
	e.uint32(m.keep)
	e.bool(m.last)
	e.bool(m.over)
	e.uint32(uint32(len(m.sizes)))
	for _, s := range m.sizes {
		e.uint64(s)
	}
}

func (m *ended) encode(e *encoder) {
	e.token(m.token)
	e.uint8(uint8(m.status))
	e.text(m.reason, maxReason)
}

// entryBytes is the least that an entry has.
const entryBytes = 2 + 1 + 1 + 1 + 4 + 3*8

// toServer reads a message to a server, which brings no files.
func toServer(kind uint16, body []byte, files int) (message, error) {
	d := decoder{r: reader{body}}
	var m message
	switch kind {
	case listMessage:
		m = &list{number: d.uint32()}
	case followMessage:
		f := &follow{number: d.uint32(), access: d.access(), room: d.uint64(), name: d.text(MaxName)}
		if d.err == nil && f.name == "" {
			d.fail("an empty name")
		}
		m = f
	case doneMessage:
		m = &done{d.token(), d.uint64(), d.status(), d.uint32(), d.text(maxReason)}
	case leaveMessage:
		m = &leave{d.token()}
	default:
		return nil, violation("a message of kind %#x, which no client sends", kind)
	}
	if err := d.end(); err != nil {
		return nil, violation("a message of kind %#x: %v", kind, err)
	}
	if files != 0 {
		return nil, violation("a message of kind %#x with %s", kind, errs.Count(files, "file descriptor"))
	}
	return m, nil
}

// lostFiles stands for the files of a message that did not fit into this process.
const lostFiles = -1

// toClient reads a message to a client.
func toClient(kind uint16, body []byte, files int) (message, error) {
	d := decoder{r: reader{body}}
	var m message
	want := 0
	switch kind {
	case listingMessage:
		l := &listing{number: d.uint32()}
		for range d.count(entryBytes, maxPublications) {
			l.entries = append(l.entries, entry{d.text(MaxName), Kind(d.uint8()), d.access(), ElementType(d.uint8()), d.uint32(), d.uint64(), d.uint64(), d.uint64()})
		}
		m = l
	case acceptedMessage:
		a := &accepted{number: d.uint32(), token: d.token(), reserved: d.uint64(), slot: d.uint32()}
		if about := d.blob(descriptorHeader); d.err == nil {
			if err := a.about.UnmarshalBinary(about); err != nil {
				d.fail("%w", err)
			}
		}
		m, want = a, 1
	case deniedMessage:
		m = &denied{d.uint32(), d.status(), d.text(maxReason)}
	case updateMessage:
		u := &update{token: d.token(), serial: d.uint64(), generation: d.uint64(), ordered: d.uint64(), length: d.uint64(),
			keep: d.uint32(), last: d.bool(), over: d.bool()}
		for range d.count(8, batchChunks) {
			u.sizes = append(u.sizes, d.uint64())
		}
		m, want = u, len(u.sizes)
	case endedMessage:
		m = &ended{d.token(), d.status(), d.text(maxReason)}
	default:
		return nil, violation("a message of kind %#x, which no server sends", kind)
	}
	if err := d.end(); err != nil {
		return nil, violation("a message of kind %#x: %v", kind, err)
	}
	if files != want && (files != lostFiles || want == 0) {
		return nil, violation("a message of kind %#x with %s instead of %d", kind, errs.Count(files, "file descriptor"), want)
	}
	return m, nil
}

func (d *decoder) status() status {
	s := status(d.uint8())
	if s >= statuses {
		d.fail("status %d", s)
	}
	return s
}

// access reads what is wished or granted, which is never nothing.
func (d *decoder) access() Access {
	a := Access(d.uint8())
	if d.err == nil && (a < ReadAccess || a > WriteAccess) {
		d.fail("access %d", a)
	}
	return a
}

// pack makes a message of what is to be said.
func pack(m message, files ...*FD) Message {
	var e encoder
	m.encode(&e)
	return Message{Kind: m.kind(), Body: e.b, FDs: files}
}
