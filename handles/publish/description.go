package publish

import (
	"crypto/sha256"
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/vmm"
)

// MaxDescription is the maximum size of a publication's description, in bytes: enough for a
// manifest of several hundred thousand tensors.
const MaxDescription = exchange.MaxText

// PublishOptions say what a publication holds. The zero value says nothing. What they say stays,
// also when another process takes the publication over.
type PublishOptions struct {
	// Description is passed to followers beside the memory ([Follower.Description]), in any
	// form that the program likes.
	Description []byte
	// Manifest says which tensors the memory holds, and is the description: followers find
	// them by name ([Follower.Tensor]), and can demand a manifest ([FollowOptions].Expect).
	// Then Description must be empty.
	Manifest *handles.Manifest
	// Page has the publication outlive this process, with memory that does: both are those that
	// a broker keeps (Client.Keep in package broker). If another process published the memory
	// before, the publication goes on with what that announced last: followers that come back
	// (DialOptions.ComeBack) keep their memory, and Publication.Stats has the generation, 0 if nothing
	// was announced. The description is the publisher's, each time. All of the memory is announced at once
	// (otherwise cuda.ErrNotSupported). Another publication can have the page once this one's server is closed, or
	// it was withdrawn, which leaves nothing whole, and is Released. The memory is not published without its page (cuda.ErrInvalidArgument).
	//
	// If that process ended while it rewrote the elements, or withdrew, it is [ErrIncomplete], unless
	// Incomplete is set: then the publication is open for rewriting (Stats.Rewriting), until
	// the caller has written all elements and called Announce. Memory that is whole is published as without it:
	// call Rewrite before writing, and also where a Turn was open.
	Page       *Page
	Incomplete bool
}

// form is what a description is.
type form uint8

const (
	noDescription form = iota
	textForm
	manifestForm
	forms
)

// described announces a description, which travels as a file.
type described struct {
	form   form
	digest [sha256.Size]byte // zero without a description
}

// description is what a publication, or a follower of it, says of the memory.
type description struct {
	described
	tag      cuda.Tag
	text     []byte
	manifest *handles.Manifest         // if that is the form
	tensors  map[string]handles.Tensor // of the manifest, by name
}

// describe makes the description that a publisher asks for.
func describe(op string, all []PublishOptions) (d description, err error) {
	if len(all) == 0 {
		return d, nil
	}
	switch o := all[0]; {
	case len(all) > 1 || o.Manifest != nil && len(o.Description) > 0:
		return d, errs.PeerInvalid(op, "more than one description", "pass one PublishOptions, with a Description or a Manifest")
	case o.Manifest != nil:
		text, err := o.Manifest.MarshalBinary()
		if err != nil {
			return d, err
		}
		return d, d.read(op, manifestForm, text)
	case len(o.Description) > 0:
		return d, d.read(op, textForm, append([]byte(nil), o.Description...))
	}
	return d, nil
}

// read takes a description's text.
func (d *description) read(op string, is form, text []byte) error {
	if is == manifestForm {
		d.manifest = new(handles.Manifest)
		if err := d.manifest.UnmarshalBinary(text); err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
		d.tensors = d.manifest.ByName()
	}
	d.described, d.text = described{is, sha256.Sum256(text)}, text
	return nil
}

// fits refuses tensors that memory with so much room never has.
func (d *description) fits(op string, room uint64) error {
	if d.manifest != nil && uint64(d.manifest.Bytes) > room {
		return errs.PeerInvalid(op, fmt.Sprintf("a manifest of %s for memory of at most %s", errs.Bytes(d.manifest.Bytes), errs.Bytes(room)), "publish the memory that the manifest describes")
	}
	return nil
}

// readDescription reads what the server sent beside its reply. Anything else than it declared
// ends the connection.
func (k *line) readDescription(op string, said *accepted, file *peer.FD) (description, error) {
	d, err := readDescription(op, said, file)
	if err != nil {
		err = k.conn.in.Fail(errs.Violation("a description of publication %x: %v", said.identity, err))
	}
	return d, err
}

func readDescription(op string, said *accepted, file *peer.FD) (d description, err error) {
	d.tag = said.tag
	if said.form == noDescription {
		return d, nil
	}
	text, err := exchange.ReadText(op, "a description", file)
	if err == nil {
		err = d.read(op, said.form, text)
	}
	if err == nil && d.digest != said.digest {
		err = fmt.Errorf("its digest is %x, where %x was declared", d.digest, said.digest)
	}
	return d, err
}

// matches compares the tensors with those that a follower expects, if it does.
func (d *description) matches(op, name string, want *handles.Manifest) error {
	if want == nil {
		return nil
	}
	if d.manifest == nil {
		return errs.Peer(op, handles.ErrMismatch, fmt.Sprintf("publication %q has no manifest", name), "follow memory of the same model, which is published with one")
	}
	if err := d.manifest.Match(want); err != nil {
		return fmt.Errorf("%s: publication %q: %w", op, name, err)
	}
	return nil
}

// Description returns what the publisher says of the memory ([PublishOptions]), or nil. With a
// manifest it is that manifest's JSON. It must not be changed.
func (f *Follower[T]) Description() []byte { return f.in().description().text }

// Manifest returns which tensors the memory holds, or nil if the publisher does not say. Their
// digests, if any, are those of the time when the publication was made. After a follower has come back to
// another publication of the name it is that one's, whose tensors are in the same places; if they are not, the
// follower ends with handles.ErrMismatch: close it and follow anew. It must not be changed.
func (f *Follower[T]) Manifest() *handles.Manifest { return f.in().description().manifest }

// Tag returns the group that the publisher's memory belongs to, in the publisher's words.
func (f *Follower[T]) Tag() cuda.Tag { return f.in().description().tag }

// Tensor returns a tensor of the manifest and the memory from its first element to its last. It
// returns [ErrUnknown] if there is none of the name, and cuda.ErrOutOfRange if the tensor is not
// shown yet (Next). Tensors of a follower of bytes are always whole elements of it;
// [handles.ErrMismatch] otherwise.
func (f *Follower[T]) Tensor(name string) (handles.Tensor, vmm.Slice[T], error) {
	const op = "publish.Follower.Tensor"
	if err := f.in().made(op); err != nil {
		return handles.Tensor{}, vmm.Slice[T]{}, err
	}
	d := f.f.description()
	t, there := d.tensors[name]
	if !there {
		return t, vmm.Slice[T]{}, errs.Peer(op, ErrUnknown, fmt.Sprintf("a tensor %s of publication %q", errs.Words(name), f.f.name), "Manifest has those that there are")
	}
	_, unit := handles.ElementOf[T]()
	if t.Offset%unit != 0 || t.Size()%unit != 0 {
		return t, vmm.Slice[T]{}, errs.Peer(op, handles.ErrMismatch, fmt.Sprintf("tensor %s of %d bytes at %d, in elements of %d", errs.Words(name), t.Size(), t.Offset, unit), "follow the publication as bytes, if it is one of bytes")
	}
	s, err := f.array.Slice(t.Offset/unit, (t.Offset+t.Size())/unit)
	if errors.Is(err, cuda.ErrOutOfRange) {
		err = errs.Peer(op, cuda.ErrOutOfRange, fmt.Sprintf("tensor %s of publication %q, which is not shown", errs.Words(name), f.f.name), "call Next first, again if the publisher had suspended the memory")
	}
	return t, s, err
}

// description returns what the publisher says of the memory.
func (f *follower) description() description {
	if f == nil {
		return description{}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.told
}
