package broker

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// state is what an object permits:
//
//	state    to            its writer           by name      its memory counts
//	writing  sealed        fills and commits    not yet      yes
//	sealed   ended         reads, as others do  is attached  yes
//	kept     ended         publishes            never        yes
//	ended                                       never again  while a process holds it
//
// An object is sealed once, by its writer, and never changes after that. It ends when it is removed,
// when its writer ends before it committed, and, if it is fleeting, with its last holder. Nothing but
// these ends it: no end of a broker does. What is kept is a publication's (publications.go).
type state uint8

const (
	writing state = iota + 1
	sealed
	ended
	kept
)

// holder is a client, by the number that it chose at random. It comes back under the same number.
type holder [16]byte

// record is what the keeper has of an object beside its files, as JSON. The files are the chunks, in
// the order of their addresses, and then the manifest, or the page of what is kept.
type record struct {
	Name      string `json:"name"`
	Version   uint64 `json:"version"` // 0 until it is sealed
	State     state  `json:"state"`
	Ephemeral bool   `json:"ephemeral,omitempty"`
	Memory    []byte `json:"memory"` // a handles.Descriptor
	Writer    holder `json:"writer"`
	// Request is the key by which the publisher asked for what is kept.
	Request keeper.Key `json:"request,omitzero"`
	// Watched: the end of the writer's process will be noticed, by this broker or the next.
	Watched bool `json:"watched,omitempty"`
	// Free: of what is kept, its publisher gave it back, or ended.
	Free bool `json:"free,omitempty"`
	// CopyOf is the key of what the writer wrote, if this is a copy of that.
	CopyOf keeper.Key `json:"copyOf,omitzero"`
	PID    int        `json:"pid"`
	UID    uint32     `json:"uid"`
	Since  time.Time  `json:"since"` // when it was made, or else sealed
}

// object is an object in the books.
type object struct {
	record
	key    keeper.Key
	memory handles.Descriptor
	bytes  int
	// descriptors are those of the chunks and of the file beside them, whether or not it is there yet.
	descriptors int
	// holders are the clients that hold it, the writer included, and whether each was asked for the memory.
	holders map[holder]bool
	// sealing: its seal is being written to the keeper, so it neither ends nor is sealed twice.
	sealing bool
	making  bool   // its memory is being made
	unseen  bool   // it is kept, and its publisher is neither connected nor watched
	files   *files // nil until the memory is there
}

// isDraft reports whether it is a copy that is not served yet.
func (o *object) isDraft() bool { return o.State == writing && o.CopyOf != counter }

// books are what a broker knows, as a machine without a keeper, a driver or clients. Its methods
// return the objects that ended by them, whose files their caller closes, the keeper's first.
type books struct {
	// limit bounds the bytes of all objects; 0 for no bound.
	limit int
	// last is the highest version that was given to any object.
	last uint64
	// returning: clients of an earlier broker may come back, so that an object without a holder may
	// have one.
	returning bool
	objects   map[keeper.Key]*object
}

func newBooks(limit int) *books {
	return &books{limit: limit, objects: map[keeper.Key]*object{}}
}

// versions returns the sealed objects of a name, the newest last.
func (b *books) versions(name string) (all []*object) {
	for _, o := range b.objects {
		if o.Name == name && o.State == sealed {
			all = append(all, o)
		}
	}
	slices.SortFunc(all, func(x, y *object) int { return cmp.Compare(x.Version, y.Version) })
	return all
}

// writers returns how many objects of a name are being written, or published.
func (b *books) writers(name string) (n int) {
	for _, o := range b.objects {
		if o.Name == name && (o.State == writing || b.awaited(o)) {
			n++
		}
	}
	return n
}

// create adds an object that h writes. A client that asks again, because it did not learn the
// outcome, gets the same object, of chunks of those sizes. With alone the name must neither be there nor be
// written.
func (b *books) create(op string, key keeper.Key, r record, sizes []int, alone bool, q Quota) (o *object, err error) {
	if o := b.objects[key]; o != nil {
		if o.Writer != r.Writer || o.State != writing || o.Name != r.Name {
			return nil, errs.Peer(op, ErrLost, fmt.Sprintf("object %q", o.Name), "create another")
		}
		return o, nil
	}
	if b.keptAs(r.Name) != nil {
		return nil, errs.Peer(op, ErrExists, fmt.Sprintf("a publication %q", r.Name), "use another name, or keep it to publish it")
	}
	if alone {
		switch {
		case len(b.versions(r.Name)) > 0:
			return nil, errs.Peer(op, ErrExists, fmt.Sprintf("object %q", r.Name), "attach it")
		case b.writers(r.Name) > 0:
			return nil, beingWritten(op, r.Name)
		}
	}
	r.State = writing
	return b.add(op, key, r, sizes, q)
}

// add adds an object of chunks of those sizes.
func (b *books) add(op string, key keeper.Key, r record, sizes []int, q Quota) (*object, error) {
	o := &object{record: r, key: key, bytes: total(sizes), descriptors: len(sizes) + 1, holders: map[holder]bool{r.Writer: false}}
	if err := b.room(op, r.UID, o.bytes, o.descriptors, q); err != nil {
		return nil, err
	}
	b.objects[key] = o
	return o, nil
}

func total(sizes []int) (bytes int) {
	for _, n := range sizes {
		bytes += n
	}
	return bytes
}

// room refuses an object that exceeds a bound.
func (b *books) room(op string, uid uint32, bytes, descriptors int, q Quota) error {
	all, own := 0, Quota{Bytes: bytes, Objects: 1, Descriptors: descriptors}
	for _, o := range b.objects {
		all += o.bytes
		if o.UID == uid && (q.Counts == nil || q.Counts(o.Name)) {
			own.Bytes, own.Objects, own.Descriptors = own.Bytes+o.bytes, own.Objects+1, own.Descriptors+o.descriptors
		}
	}
	refused := func(alone bool, asked, raise string) error {
		hint := "remove objects that are not needed, and end the processes that hold them"
		if alone { // nothing that could be removed makes room
			hint = "ask for less, or have that limit raised (" + raise + ")"
		}
		return errs.Peer(op, ErrLimit, asked, hint)
	}
	overQuota := func(alone bool, asked string) error {
		return quotaError{refused(alone, asked, "the policy's, or cuvmm serve -limit-per-user")}
	}
	switch {
	case len(b.objects) >= keeper.MaxEntries-1:
		return errs.Peer(op, ErrLimit, fmt.Sprintf("%d objects", len(b.objects)+1), "remove some")
	case b.limit > 0 && bytes > b.limit-all:
		return refused(bytes > b.limit, fmt.Sprintf("%s, where %s of %s are taken", errs.Bytes(bytes), errs.Bytes(all), errs.Bytes(b.limit)), "cuvmm serve -limit")
	case q.Bytes > 0 && own.Bytes > q.Bytes:
		return overQuota(bytes > q.Bytes, fmt.Sprintf("%s for user %d, who has %s of %s", errs.Bytes(bytes), uid, errs.Bytes(own.Bytes-bytes), errs.Bytes(q.Bytes)))
	case q.Objects > 0 && own.Objects > q.Objects:
		return overQuota(false, fmt.Sprintf("another object of user %d, who has %d of %d", uid, own.Objects-1, q.Objects))
	case q.Descriptors > 0 && own.Descriptors > q.Descriptors:
		return overQuota(descriptors > q.Descriptors, fmt.Sprintf("%s for user %d, who has %d of %d", errs.Count(descriptors, "descriptor"), uid, own.Descriptors-descriptors, q.Descriptors))
	}
	return nil
}

// quotaError is a refusal that only the user's own objects can undo.
type quotaError struct{ error }

func (e quotaError) Unwrap() error { return e.error }

// wanted is a holder that is asked for an object's memory, or was before.
type wanted struct {
	by     holder
	key    keeper.Key
	before bool
}

// want returns who is asked for memory: the holders of objects that end with their last, the oldest
// first, until these have so many bytes. Each holder is asked once.
func (b *books) want(bytes int, counts func(*object) bool) (all []wanted) {
	for _, o := range slices.Backward(b.newestFirst()) {
		if bytes <= 0 {
			break
		}
		if o.State != sealed || o.sealing || !b.fleeting(o) || !counts(o) {
			continue
		}
		bytes -= o.bytes
		for h, asked := range o.holders {
			o.holders[h] = true
			all = append(all, wanted{h, o.key, asked})
		}
	}
	return all
}

// errSealing: the object is being sealed.
var errSealing = errors.New("an object that is being committed")

// seal begins to seal an object. A client that did not learn the outcome asks again, and gets what is sealed: the object, or its
// copy. The caller writes what sealedRecord returns to the keeper, and ends with sealEnded.
func (b *books) seal(op string, h holder, key keeper.Key) (*object, error) {
	if o := b.copyOf(key, h); o != nil {
		return o, nil
	}
	o := b.objects[key]
	switch {
	case o == nil || o.State == ended:
		return nil, errs.Peer(op, ErrLost, "the object that was written", "write it again")
	case o.Writer != h:
		return nil, errs.Peer(op, cuda.ErrNotPermitted, fmt.Sprintf("object %q, which another client writes", o.Name), "write one of your own")
	case o.State == sealed:
		return o, nil
	case o.State == kept:
		return nil, errs.Violation("a commit of memory that is published")
	case o.sealing:
		return nil, errSealing
	case o.files == nil:
		return nil, errs.Violation("a commit of an object that is being made")
	}
	o.sealing = true
	return o, nil
}

// sealedRecord is the record of an object once it is sealed.
func (b *books) sealedRecord(o *object, now time.Time) record {
	b.last++ // spent, whatever comes of it
	r := o.record
	r.State, r.Version, r.Since = sealed, b.last, now
	return r
}

// sealEnded ends what seal began: the keeper has the record, or ok is false. The version before it of
// the name, which is fleeting now, ends if nobody holds it, and so does o if its writer went meanwhile.
func (b *books) sealEnded(o *object, r record, ok bool) (gone []*object) {
	o.sealing = false
	if ok {
		o.record = r
		for _, old := range b.versions(o.Name) {
			gone = append(gone, b.passing(old)...)
		}
	} else {
		gone = b.passing(o)
	}
	return gone
}

// find returns a sealed object by its name: the newest, or a version.
func (b *books) find(op, name string, version uint64) (*object, error) {
	all := b.versions(name)
	if len(all) > 0 && version == 0 {
		return all[len(all)-1], nil
	}
	for _, o := range all {
		if o.Version == version {
			return o, nil
		}
	}
	switch {
	case b.keptAs(name) != nil:
		return nil, errs.Peer(op, ErrUnknown, fmt.Sprintf("an object of the name %q, which is a publication's", name), "follow that publication")
	case len(all) > 0:
		return nil, errs.Peer(op, ErrUnknown, fmt.Sprintf("version %d of object %q, which has version %d now", version, name, all[len(all)-1].Version), "attach that one")
	case b.writers(name) > 0:
		return nil, beingWritten(op, name)
	}
	return nil, notThere(op, name)
}

// notThere refuses a name of no object, and one that the client may not know of.
func notThere(op, name string) error {
	return errs.Peer(op, ErrUnknown, fmt.Sprintf("an object of the name %q", name), "see whether the name is right, or have a process write it")
}

// beingWritten refuses a name whose writer has not committed.
func beingWritten(op, name string) error {
	return errs.Peer(op, ErrWriting, fmt.Sprintf("object %q", name), "wait until its writer commits it, or ends")
}

// hold adds a holder. A client that comes back says what it holds; of what ended it keeps its memory,
// which counts again.
func (b *books) hold(op string, h holder, key keeper.Key) error {
	o := b.objects[key]
	const hint = "close it when it is no longer needed, and ask anew"
	if o == nil || o.State == kept && (o.Free || o.Writer != h) {
		return errs.Peer(op, ErrLost, "what this client held", hint)
	}
	o.holders[h], o.unseen = false, false
	if o.State == ended {
		return errs.Peer(op, ErrLost, fmt.Sprintf("object %q", o.Name), hint)
	}
	return nil
}

// release ends a holder's hold.
func (b *books) release(h holder, key keeper.Key) (gone []*object) {
	o := b.objects[key]
	if o == nil || o.State == kept { // see unpublish
		return nil
	}
	delete(o.holders, h)
	if o.State == writing && o.Writer == h && !o.sealing {
		return b.end(o) // it will not be committed
	}
	return b.passing(o)
}

// holds reports whether a client holds anything.
func (b *books) holds(h holder) bool {
	for _, o := range b.objects {
		if _, there := o.holders[h]; there {
			return true
		}
	}
	return false
}

// leave ends all holds of a holder, whose process has ended.
func (b *books) leave(h holder) (gone []*object) {
	for _, o := range b.newestFirst() {
		gone = append(gone, b.release(h, o.key)...)
	}
	return gone
}

// newestFirst returns all objects in an order in which a version is not ended because of a newer one
// that ends, too.
func (b *books) newestFirst() []*object {
	return slices.SortedFunc(maps.Values(b.objects), func(x, y *object) int { return cmp.Compare(y.Version, x.Version) })
}

// settle ends what nobody came back for.
func (b *books) settle() (gone []*object) {
	b.returning = false
	for _, o := range b.newestFirst() {
		gone = append(gone, b.passing(o)...)
	}
	return gone
}

// passing ends an object that needs a holder and has none, and forgets one that ended.
func (b *books) passing(o *object) (gone []*object) {
	switch {
	case o.sealing:
		return nil
	case o.State == ended:
		if len(o.holders) == 0 && !o.making && !b.returning {
			delete(b.objects, o.key)
		}
		return nil
	case b.returning || o.State == kept:
		return nil
	case o.State == writing:
		if _, there := o.holders[o.Writer]; there {
			return nil
		}
	case len(o.holders) > 0 || !b.fleeting(o):
		return nil
	}
	return b.end(o)
}

// fleeting reports whether a sealed object ends with its last holder: it is ephemeral, or there is a
// newer version.
func (b *books) fleeting(o *object) bool {
	all := b.versions(o.Name)
	return o.Ephemeral || all[len(all)-1] != o
}

// end ends an object. Its memory counts while it is made, and while it has holders, who may yet come back; nobody but
// its writer has one that was not sealed.
func (b *books) end(o *object) []*object {
	if len(o.holders) == 0 && !o.making && (!b.returning || o.State == writing) {
		delete(b.objects, o.key)
	}
	o.State = ended
	return []*object{o}
}

// discard forgets an object whose memory could not be made, or that ended meanwhile: no process has it.
func (b *books) discard(o *object) []*object {
	clear(o.holders)
	delete(b.objects, o.key)
	o.State = ended
	return []*object{o}
}

// remove ends the sealed objects of a name, or one version, or the publication of that name.
func (b *books) remove(op, name string, version uint64) (gone []*object, err error) {
	if version != 0 {
		if b.keptAs(name) != nil {
			return nil, errs.Peer(op, ErrUnknown, fmt.Sprintf("version %d of publication %q, which has no versions", version, name), "remove version 0")
		}
		o, err := b.find(op, name, version)
		if err != nil {
			return nil, err
		}
		return b.end(o), nil
	}
	all := b.versions(name)
	if o := b.keptAs(name); o != nil {
		if o.unseen {
			clear(o.holders) // whose end is not noticed
		}
		all = append(all, o)
	}
	if len(all) == 0 {
		_, err := b.find(op, name, 0)
		return nil, err
	}
	for _, o := range all {
		gone = append(gone, b.end(o)...)
	}
	return gone, nil
}

// counter is the key of the entry that has the highest version that was given, so that none is given
// twice.
var counter keeper.Key

// restore adds what a keeper had of an object, or the counter. The books own its files then.
func (b *books) restore(e *keeper.Entry) error {
	if e.Key == counter {
		return json.Unmarshal(e.Record, &b.last)
	}
	o := &object{key: e.Key, holders: map[holder]bool{}}
	if err := json.Unmarshal(e.Record, &o.record); err != nil {
		return err
	}
	if err := o.memory.UnmarshalBinary(o.Memory); err != nil {
		return err
	}
	n := len(o.memory.Chunks)
	if beside := map[state]int{writing: 0, sealed: 1, kept: 1}; o.State == ended || len(e.Files) != n+beside[o.State] {
		return fmt.Errorf("object %q in state %d, with %d files for %d chunks", o.Name, o.State, len(e.Files), n)
	}
	o.bytes, o.descriptors = o.memory.Size(), n+1
	if o.State == kept && !o.Free { // whether or not its publisher comes back
		o.holders[o.Writer], o.unseen = false, !o.Watched
	}
	o.files = &files{chunks: e.Files[:n:n]}
	if len(e.Files) > n {
		o.files.beside = e.Files[n]
	}
	b.objects[o.key], b.returning = o, true
	return nil
}

// files are an object's open files in this process.
type files struct {
	chunks []*peer.FD
	beside *peer.FD // the manifest, nil until it is sealed; or the page of what is kept
	// users are the transfers that send them; over: the last of those closes them.
	users int
	over  bool
}

func (f *files) close() {
	_ = peer.CloseAll(f.all()) // even after an error the numbers are released
}

func (f *files) all() []*peer.FD {
	if f.beside == nil {
		return f.chunks
	}
	return append(slices.Clip(f.chunks), f.beside)
}
