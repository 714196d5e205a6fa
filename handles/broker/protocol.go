package broker

import (
	"errors"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wire"
)

const (
	// MaxName bounds the name of an object, in bytes of UTF-8.
	MaxName = 255
	// maxListing is how many objects a message lists.
	maxListing = 512
)

// request is every message to a broker but the first. Each has the fields that its kind uses.
type request struct {
	kind uint16
	// number is the client's, of this request.
	number uint32
	key    keeper.Key // create, keep, commit, hold, release
	name   string     // create, keep, attach, remove, await
	// version is that to attach or to remove; 0 is the newest, or all.
	version          uint64
	device           cuda.UUID // create, keep
	bytes            uint64    // create, keep
	ephemeral, alone bool      // create
	manifest         *peer.FD  // commit
}

// fields are what the kinds of requests have, beside their number.
var fields = map[uint16]struct{ key, name, version, memory, options, manifest bool }{
	wire.BrokerCreate:  {key: true, name: true, memory: true, options: true},
	wire.BrokerKeep:    {key: true, name: true, memory: true},
	wire.BrokerCommit:  {key: true, manifest: true},
	wire.BrokerAttach:  {name: true, version: true},
	wire.BrokerHold:    {key: true},
	wire.BrokerRelease: {key: true},
	wire.BrokerRemove:  {name: true, version: true},
	wire.BrokerList:    {},
	wire.BrokerAwait:   {name: true},
	wire.BrokerCancel:  {},
	wire.BrokerAsk:     {},
}

func (r *request) pack() peer.Message {
	e := wire.Encoder{}
	e.Uint32(r.number)
	f := fields[r.kind]
	if f.key {
		e.Raw(r.key[:])
	}
	if f.name {
		e.Text(r.name, MaxName)
	}
	if f.version {
		e.Uint64(r.version)
	}
	if f.memory {
		e.Raw(r.device[:])
		e.Uint64(r.bytes)
	}
	if f.options {
		e.Bool(r.ephemeral)
		e.Bool(r.alone)
	}
	m := peer.Message{Kind: r.kind, Body: e.B}
	if r.manifest != nil {
		m.FDs = []*peer.FD{r.manifest}
	}
	return m
}

// parseRequest reads a request, whose descriptors stay the message's.
func parseRequest(m peer.Message) (r request, err error) {
	f, known := fields[m.Kind]
	if !known {
		return r, errs.Violation("a message of kind %#x to a broker", m.Kind)
	}
	d := wire.Decoder{B: m.Body}
	r.kind, r.number = m.Kind, d.Uint32()
	if f.key {
		copy(r.key[:], d.Raw(len(r.key)))
		if d.Err() == nil && r.key == counter {
			d.Fail("a key of zeros")
		}
	}
	if f.name {
		if r.name = d.Text(MaxName); d.Err() == nil && r.name == "" {
			d.Fail("an empty name")
		}
	}
	if f.version {
		r.version = d.Uint64()
	}
	if f.memory {
		copy(r.device[:], d.Raw(len(r.device)))
		r.bytes = d.Uint64()
		if d.Err() == nil && (r.bytes == 0 || r.bytes > maxBytes) {
			d.Fail("an object of %d bytes", r.bytes)
		}
	}
	if f.options {
		r.ephemeral, r.alone = d.Bool(), d.Bool()
	}
	want := 0
	if f.manifest {
		want = 1
	}
	if len(m.FDs) != want {
		d.Fail("%s, where %d belong", errs.Count(len(m.FDs), "file descriptor"), want)
	} else if f.manifest {
		r.manifest = m.FDs[0]
	}
	if err := d.End(); err != nil {
		return r, errs.Violation("a message of kind %#x: %v", m.Kind, err)
	}
	return r, nil
}

// maxBytes exceeds any device's address space.
const maxBytes = 1 << 60

// Listing describes an object.
type Listing struct {
	Name string
	// Version is higher for each object that is committed, whatever its name; 0 while it is written.
	Version uint64
	// Device has the memory, of so many bytes.
	Device cuda.UUID
	Bytes  int
	// Holders is how many clients hold it, and HeldBy which of them are connected, at most 16.
	Holders int
	HeldBy  []peer.Credentials
	// Ephemeral objects end with their last holder.
	Ephemeral bool
	// Publication is memory of a publication ([Client.Keep]), whose Version is 0. Its publisher holds it.
	Publication bool
	// PID and UID are the process and the user that wrote it, or published it last, as the broker sees them.
	PID int
	UID uint32
	// Since is when it was committed, or else when its writing, or its last publishing, began.
	Since time.Time
}

// maxHeldBy bounds Listing.HeldBy.
const maxHeldBy = 16

func (l *Listing) encode(e *wire.Encoder) {
	e.Text(l.Name, MaxName)
	e.Uint64(l.Version)
	e.Raw(l.Device[:])
	e.Uint64(uint64(l.Bytes))
	e.Uint32(uint32(l.Holders))
	e.Uint32(uint32(len(l.HeldBy)))
	for _, p := range l.HeldBy {
		e.Uint32(uint32(p.PID))
		e.Uint32(p.UID)
		e.Uint32(p.GID)
	}
	e.Bool(l.Ephemeral)
	e.Bool(l.Publication)
	e.Uint32(uint32(l.PID))
	e.Uint32(l.UID)
	e.Uint64(uint64(l.Since.UnixNano()))
}

func (l *Listing) decode(d *wire.Decoder) {
	l.Name, l.Version = d.Text(MaxName), d.Uint64()
	copy(l.Device[:], d.Raw(len(l.Device)))
	bytes := d.Uint64()
	if bytes > maxBytes {
		d.Fail("an object of %d bytes", bytes)
	}
	l.Bytes, l.Holders = int(bytes), int(d.Uint32())
	if n := d.Count(12, maxHeldBy); n > 0 {
		l.HeldBy = make([]peer.Credentials, n)
	}
	for i := range l.HeldBy {
		l.HeldBy[i] = peer.Credentials{PID: int(d.Uint32()), UID: d.Uint32(), GID: d.Uint32()}
	}
	l.Ephemeral, l.Publication = d.Bool(), d.Bool()
	l.PID, l.UID = int(d.Uint32()), d.Uint32()
	l.Since = time.Unix(0, int64(d.Uint64()))
}

// leastListing is the least that an object takes in a listing, in bytes.
const leastListing = 2 + 8 + 16 + 8 + 4 + 4 + 1 + 1 + 4 + 4 + 8

// reply is every message of a broker.
type reply struct {
	kind   uint16
	number uint32
	// version is that of a commit that is done, or 0.
	version uint64
	// status and reason say why a request is denied.
	status status
	reason string
	// key and objects[0] are the object whose memory follows, and beside its manifest, nil while it
	// is written, or the page of a publication. key alone is the object that is wanted.
	key     keeper.Key
	objects []Listing
	beside  *peer.FD
	// last: the objects are the last of a listing.
	last   bool
	health Status
}

func (r *reply) pack() peer.Message {
	e := wire.Encoder{}
	e.Uint32(r.number)
	switch r.kind {
	case wire.BrokerDone:
		e.Uint64(r.version)
	case wire.BrokerDenied:
		e.Uint8(uint8(r.status))
		e.Text(r.reason, wire.MaxReason)
	case wire.BrokerObject:
		e.Raw(r.key[:])
		r.objects[0].encode(&e)
	case wire.BrokerWanted:
		e.Raw(r.key[:])
	case wire.BrokerStatus:
		r.health.encode(&e)
	case wire.BrokerListing:
		e.Bool(r.last)
		e.Uint32(uint32(len(r.objects)))
		for i := range r.objects {
			r.objects[i].encode(&e)
		}
	}
	m := peer.Message{Kind: r.kind, Body: e.B}
	if r.beside != nil {
		m.FDs = []*peer.FD{r.beside}
	}
	return m
}

// parseReply reads a reply, whose descriptors stay the message's.
func parseReply(m peer.Message) (r reply, err error) {
	d := wire.Decoder{B: m.Body}
	r.kind, r.number = m.Kind, d.Uint32()
	files := 0
	switch r.kind {
	case wire.BrokerDone:
		r.version = d.Uint64()
	case wire.BrokerDenied:
		r.status, r.reason = status(d.Uint8()), d.Text(wire.MaxReason)
	case wire.BrokerObject:
		copy(r.key[:], d.Raw(len(r.key)))
		r.objects = make([]Listing, 1)
		r.objects[0].decode(&d)
		if files = len(m.FDs); files > 0 {
			r.beside = m.FDs[0]
		}
		if files > 1 {
			d.Fail("%d files beside an object", files)
		}
	case wire.BrokerWanted:
		copy(r.key[:], d.Raw(len(r.key)))
	case wire.BrokerStatus:
		r.health.decode(&d)
	case wire.BrokerListing:
		r.last = d.Bool()
		r.objects = make([]Listing, d.Count(leastListing, maxListing))
		for i := range r.objects {
			r.objects[i].decode(&d)
		}
	default:
		return r, errs.Violation("a message of kind %#x of a broker", m.Kind)
	}
	if len(m.FDs) != files {
		d.Fail("%s beside a message that has none", errs.Count(len(m.FDs), "file descriptor"))
	}
	if err := d.End(); err != nil {
		return r, errs.Violation("a message of kind %#x: %v", m.Kind, err)
	}
	return r, nil
}

// status is why a request is denied.
type status uint8

// statuses are the kinds of errors that cross the connection. The place of each is its number.
var statuses = []error{nil, ErrUnknown, ErrWriting, ErrExists, ErrLimit, ErrLost, cuda.ErrNotPermitted, cuda.ErrNotSupported, cuda.ErrOutOfMemory, cuda.ErrInvalidArgument}

// opServe is what a broker does when it denies a request, in its own errors. The client has its own operation.
const opServe = "broker.Broker.Serve"

// denial is the reply that says why. Go, Python and the shell print the reason as it is, so it names nothing of one
// language; what each documents of the error names its option.
func denial(number uint32, why error) *reply {
	r := &reply{kind: wire.BrokerDenied, number: number, reason: strings.TrimPrefix(why.Error(), opServe+": ")}
	for i, kind := range statuses {
		if kind != nil && errors.Is(why, kind) {
			r.status = status(i)
		}
	}
	return r
}

// err is the error of a denied request.
func (r *reply) err(op string) error {
	kind := peer.ErrRefused
	if int(r.status) < len(statuses) && r.status > 0 {
		kind = statuses[r.status]
	}
	return errs.Peer(op, kind, "the broker refused: "+errs.Words(strings.TrimPrefix(r.reason, kind.Error()+": ")), "")
}
