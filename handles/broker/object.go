package broker

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/load"
	"github.com/cuvmm/cuvmm/vmm"
)

// Object is an object that this process has attached, or wrote and committed. All methods are safe
// for concurrent use. The caller closes it.
type Object struct {
	k        *Client
	key      keeper.Key
	buffer   *vmm.Buffer
	manifest handles.Manifest
	page     *publish.Page // of a publication
	tensors  map[string]handles.Tensor
	closer   life.Closer
	ask      sync.Once
	wanted   chan struct{} // ask closes it

	mu    sync.Mutex
	about Listing
	lost  error
}

// AttachOptions configure [Client.Attach]. The zero value attaches the newest version that is there.
type AttachOptions struct {
	// Version is the version to attach; 0 is the newest.
	Version uint64
	// Wait waits, within the context, for an object that is being written. Without it that is
	// ErrWriting.
	Wait bool
	// Hint is the preferred address; see handles.ImportOptions.
	Hint cuda.Ptr
}

// Attach maps an object of a name for a device, at one address, for reading. The memory may lie on
// another device, if d can reach that (otherwise cuda.ErrNotSupported). An object that is not there
// is ErrUnknown: nothing is loaded instead (see [Client.Ensure]). If the context ends the object may
// be held a moment longer.
func (k *Client) Attach(ctx context.Context, d *cuda.Device, name string, o AttachOptions) (*Object, error) {
	const op = "broker.Client.Attach"
	if err := k.made(op); err != nil {
		return nil, err
	}
	if core.SystemOf(d) == nil { // before the memory is on its way
		return nil, errs.PeerInvalid(op, "a nil device", "take one from System.Devices")
	}
	if err := checkName(op, name); err != nil {
		return nil, err
	}
	for {
		got, err := k.take(ctx, op, d, request{kind: wire.BrokerAttach, name: name, version: o.Version}, handles.ImportOptions{ReadOnly: true, Hint: o.Hint})
		if !o.Wait || !errors.Is(err, ErrWriting) {
			return got, err
		}
		if err := k.await(ctx, op, name, fmt.Sprintf("a process still writes object %q", name)); err != nil {
			return nil, err
		}
	}
}

// take has the broker give an object, and maps it. Once the request is sent it goes on to its end,
// also if the context ends meanwhile, since the memory is on its way.
func (k *Client) take(ctx context.Context, op string, d *cuda.Device, r request, o handles.ImportOptions) (got *Object, err error) {
	if !k.closer.Acquire() {
		return nil, errs.PeerClosed(op, "client")
	}
	defer k.closer.Release()
	var unknown *line // the request was lost with it, and the broker may have given what it asked for
	err = k.on(ctx, op, func(ctx context.Context, l *line) error {
		if !l.giving.Take(ctx, l.over) {
			if ctx.Err() != nil {
				return errs.PeerWait(ctx, op, "the request was not sent to "+k.broker(), "try again, with a longer limit")
			}
			return errs.Peer(op, peer.ErrGone, k.broker(), "")
		}
		type result struct {
			o   *Object
			err error
		}
		done := make(chan result, 1)
		k.running.Go(func() {
			o, err := k.receive(op, l, d, r, o)
			l.giving.Give()
			done <- result{o, err}
		})
		select {
		case x := <-done:
			if got = x.o; lineOver(l, x.err) {
				unknown = l
			}
			return x.err
		case <-ctx.Done():
		}
		k.running.Go(func() {
			switch x := <-done; {
			case x.o != nil:
				_ = x.o.Close()
			case lineOver(l, x.err):
				k.forgo(l, r.key)
			}
		})
		return l.late(ctx, op, "has not sent the memory")
	})
	if err != nil && unknown != nil {
		k.forgo(unknown, r.key)
	}
	return got, err
}

// forgo gives back what a request with a key may have brought: nobody asks with that again.
func (k *Client) forgo(l *line, key keeper.Key) {
	if key != (keeper.Key{}) {
		k.giveBack(l, key)
	}
}

// receive sends the request, and maps what comes.
func (k *Client) receive(op string, l *line, d *cuda.Device, r request, o handles.ImportOptions) (*Object, error) {
	ctx := context.WithoutCancel(k.ctx) // the connection bounds it
	reply, err := l.do(ctx, op, r)
	if err != nil {
		return nil, err
	}
	if reply.kind != wire.BrokerObject {
		return nil, errs.Violation("a reply of kind %#x, where an object was to come", reply.kind)
	}
	got := &Object{k: k, key: reply.key, about: reply.objects[0], wanted: make(chan struct{})}
	what := "object"
	if r.kind == wire.BrokerKeep {
		what = "publication"
	}
	if label := (life.Label{Name: what + " " + r.name}); label.Check(op) == nil {
		o.Name = label.Name
	}
	got.buffer, err = handles.ReceiveBuffer(ctx, l.c, d, o)
	if err == nil {
		err = got.describe(op, reply.beside)
	} else if reply.beside != nil {
		_ = reply.beside.Close()
	}
	if err != nil {
		err = fmt.Errorf("%s: %s %q: %w", op, what, r.name, err)
		if got.buffer != nil {
			err = errs.Both(err, got.buffer.Close())
		}
		k.release(l, got.key)
		return nil, err
	}
	k.hold(got)
	return got, nil
}

// describe reads the manifest, which the broker has checked, and checks it.
func (o *Object) describe(op string, f *peer.FD) error {
	switch {
	case f == nil: // it is being written
		return nil
	case o.about.Publication:
		id := sha256.Sum256(append([]byte("cuvmm publication "), o.key[:]...))
		o.page = publish.NewPage([16]byte(id[:]), o.buffer, f)
		return nil
	}
	defer func() { _ = f.Close() }()
	text, err := exchange.ReadText(op, "a manifest", f)
	if err != nil {
		return err
	}
	if err := o.manifest.UnmarshalBinary(text); err != nil {
		return err
	}
	if o.manifest.Bytes != o.buffer.Len() {
		return errs.Peer(op, handles.ErrManifest, fmt.Sprintf("a manifest of %s for an object of %s", errs.Bytes(o.manifest.Bytes), errs.Bytes(o.buffer.Len())), "write the object anew")
	}
	o.tensors = o.manifest.ByName()
	return nil
}

// lose notes that the broker does not have the object any more.
func (o *Object) lose(why error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lost = why
}

// Buffer returns the memory. It is closed with the object.
func (o *Object) Buffer() *vmm.Buffer {
	if o == nil {
		return nil
	}
	return o.buffer
}

// Manifest says what is in the memory, and where. It must not be changed.
func (o *Object) Manifest() *handles.Manifest {
	if o == nil {
		return nil
	}
	return &o.manifest
}

// Tensor returns the memory of a tensor by its name, or ErrUnknown.
func (o *Object) Tensor(name string) (handles.Tensor, vmm.Slice[byte], error) {
	if o == nil {
		return handles.Tensor{}, vmm.Slice[byte]{}, errs.PeerInvalid("broker.Object.Tensor", "a nil object", "take one from Client.Attach")
	}
	t, there := o.tensors[name]
	if !there {
		return t, vmm.Slice[byte]{}, errs.Peer("broker.Object.Tensor", ErrUnknown, fmt.Sprintf("a tensor %q in object %q", name, o.About().Name), "see Object.Manifest for those that there are")
	}
	s, err := o.buffer.Slice(t.Offset, t.Offset+t.Size())
	return t, s, err
}

// Verify reads the memory, and compares it with the digests of the manifest: load.ErrDigest says that a
// process wrote to it since they were made. A tensor without a digest is cuda.ErrNotSupported. It takes as
// long as copying the memory to the host.
func (o *Object) Verify(ctx context.Context) error {
	const op = "broker.Object.Verify"
	return o.reading(op, true, func(s *cuda.Stream) error {
		_, err := load.Verify(ctx, load.Options{}, s, &o.manifest, o.buffer.Ptr())
		return err
	})
}

// reading has a function read the tensors on a stream, while the object stays open. With digests each
// tensor must have one.
func (o *Object) reading(op string, digests bool, f func(*cuda.Stream) error) (err error) {
	if o == nil || o.buffer == nil {
		return errs.PeerInvalid(op, "a nil or zero object", "take one from Client.Attach")
	}
	if !o.closer.Acquire() {
		return errs.PeerClosed(op, "object")
	}
	defer o.closer.Release()
	name := o.About().Name
	if len(o.manifest.Tensors) == 0 {
		return errs.Peer(op, cuda.ErrNotSupported, fmt.Sprintf("object %q, whose manifest has no tensors", name), "have its writer commit it with a manifest of tensors")
	}
	for _, t := range o.manifest.Tensors {
		if digests && t.Digest == "" {
			return errs.Peer(op, cuda.ErrNotSupported, fmt.Sprintf("tensor %q of object %q, which has no digest", t.Name, name),
				"have its writer commit it with digests: load.Verify makes them, or digests=True in Python")
		}
	}
	s, err := o.buffer.Device().NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errs.Both(err, s.Close()) }()
	if err := f(s); err != nil {
		return fmt.Errorf("%s: object %q: %w", op, name, err)
	}
	return nil
}

// About describes the object, as of the time when it was attached.
func (o *Object) About() Listing {
	if o == nil {
		return Listing{}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.about
}

// Err returns ErrLost once a broker that this client came back to does not have the object, and otherwise
// nil, also if the object was removed meanwhile. The memory stays as it is in either case.
func (o *Object) Err() error {
	if o == nil {
		return errs.PeerInvalid("broker.Object.Err", "a nil object", "take one from Client.Attach")
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.lost
}

func (o *Object) want() { o.ask.Do(func() { close(o.wanted) }) }

// Wanted is closed when the broker asks for the memory: there is no room for what another process wants to
// write, and the object, which is ephemeral or has a newer version, ends with its last holder. A holder that
// can do without it closes it within a second.
func (o *Object) Wanted() <-chan struct{} {
	if o == nil {
		return nil
	}
	return o.wanted
}

// Close closes the buffer, which waits for the work on it, and tells the broker. A broker that is away
// is told when it is back. Idempotent; after an error it may be called again.
func (o *Object) Close() error {
	if o == nil || o.buffer == nil {
		return errs.PeerInvalid("broker.Object.Close", "a nil or zero object", "take one from Client.Attach")
	}
	return o.closer.Close(func() error {
		if err := o.buffer.Close(); err != nil {
			return err
		}
		if o.page != nil {
			if err := o.page.Close(); err != nil {
				return err
			}
		}
		o.k.letGo(o)
		return nil
	})
}

// Writer is an object that this process writes. Its methods are safe for concurrent use. The caller
// closes it, whether or not it was committed.
type Writer struct {
	o         *Object
	bytes     int
	mu        sync.Mutex
	committed bool
}

// CreateOptions configure [Client.Create].
type CreateOptions struct {
	// Bytes is the size of the object.
	Bytes int
	// Ephemeral has the object end with its last holder. Otherwise it stays until it is removed, or
	// until a newer version has replaced it and nobody holds it.
	Ephemeral bool
	// Alone refuses to write an object whose name is there (ErrExists) or being written (ErrWriting).
	Alone bool
}

// Create makes an object for this process to write, on a device. Nobody else sees it before its
// [Writer.Commit], and nobody ever does if this process ends before that. Its contents are undefined.
// It needs write access to the name. The caller closes the writer.
func (k *Client) Create(ctx context.Context, d *cuda.Device, name string, o CreateOptions) (*Writer, error) {
	const op = "broker.Client.Create"
	if err := k.made(op); err != nil {
		return nil, err
	}
	switch {
	case o.Bytes <= 0 || o.Bytes > maxBytes:
		return nil, errs.PeerInvalid(op, fmt.Sprintf("an object of %d bytes", o.Bytes), "name the size of its memory")
	case core.SystemOf(d) == nil:
		return nil, errs.PeerInvalid(op, "a nil device", "take one from System.Devices")
	}
	if err := checkName(op, name); err != nil {
		return nil, err
	}
	r := request{kind: wire.BrokerCreate, name: name, device: d.UUID(), bytes: uint64(o.Bytes), ephemeral: o.Ephemeral, alone: o.Alone}
	_, _ = rand.Read(r.key[:]) // never fails; the same with each broker that is asked
	got, err := k.take(ctx, op, d, r, handles.ImportOptions{})
	if err != nil {
		return nil, err
	}
	return &Writer{o: got, bytes: o.Bytes}, nil
}

// Buffer returns the memory to fill, of CreateOptions.Bytes. It is closed with the writer, or with the
// object once that is committed.
func (w *Writer) Buffer() *vmm.Buffer {
	if w == nil {
		return nil
	}
	return w.o.Buffer()
}

// Commit waits for the work on the streams, and then has the broker serve the object: from now on it
// is attached by its name. What was not written by then never will be: the memory can only be read in
// this process, too. The manifest says what is in it, and has its size; nil says nothing. The object is
// the caller's, as if it had been attached.
//
// After an error, other than ErrLost, Commit can be called again. If the context ends, the object may
// have been committed, and a further call says so.
func (w *Writer) Commit(ctx context.Context, m *handles.Manifest, streams ...*cuda.Stream) (*Object, error) {
	const op = "broker.Writer.Commit"
	if w == nil || w.o == nil {
		return nil, errs.PeerInvalid(op, "a nil or zero writer", "take one from Client.Create")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.committed:
		return nil, errs.Peer(op, cuda.ErrInUse, "an object that is committed", "create another")
	case w.o.closer.Closed():
		return nil, errs.PeerClosed(op, "writer")
	case w.o.buffer.Len() != w.bytes:
		return nil, errs.PeerInvalid(op, fmt.Sprintf("a buffer of %s, which had %s", errs.Bytes(w.o.buffer.Len()), errs.Bytes(w.bytes)), "leave its length, and do not close it")
	case m == nil:
		m = &handles.Manifest{Bytes: w.bytes}
	}
	if m.Bytes != w.bytes {
		return nil, errs.PeerInvalid(op, fmt.Sprintf("a manifest of %s for an object of %s", errs.Bytes(m.Bytes), errs.Bytes(w.bytes)), "describe the whole object, or create one of that size")
	}
	text, err := m.MarshalBinary()
	if err != nil {
		return nil, err
	}
	if err := finish(ctx, op, streams); err != nil {
		return nil, err
	}
	if err := share.Of(w.o.buffer).Seal(op, fmt.Sprintf("object %q, which was committed", w.o.about.Name)); err != nil {
		return nil, err
	}
	f, err := exchange.TextFile(op, "a manifest", text)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	k := w.o.k
	if !k.commits.Take(ctx, k.closing.Done()) {
		if k.closing.Err() != nil {
			return nil, errs.PeerClosed(op, "client")
		}
		return nil, errs.PeerWait(ctx, op, "other commits of this client are not done", "commit again, or close the writer")
	}
	defer k.commits.Give()
	var done reply
	err = k.on(ctx, op, func(ctx context.Context, l *line) (err error) {
		done, err = l.await(ctx, op, request{kind: wire.BrokerCommit, key: w.o.key, manifest: f})
		return err
	})
	if err != nil {
		return nil, err
	}
	w.committed = true
	w.o.mu.Lock()
	w.o.about.Version = done.version
	w.o.mu.Unlock()
	w.o.manifest, w.o.tensors = *m, m.ByName()
	return w.o, nil
}

// finish waits for the work on streams.
func finish(ctx context.Context, op string, streams []*cuda.Stream) error {
	done := make(chan error, 1)
	go func() {
		var err error
		for _, s := range streams {
			if s != nil { // work without a stream is done
				err = errs.Both(err, s.Synchronize())
			}
		}
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return errs.PeerWait(ctx, op, "the work on the streams is not done", "commit again, or close the writer")
	}
}

// Close gives the object up, unless it was committed, in which case it does nothing. It waits for the
// work on the buffer. After a Commit whose context ended, the object may have been committed.
func (w *Writer) Close() error {
	if w == nil || w.o == nil {
		return errs.PeerInvalid("broker.Writer.Close", "a nil or zero writer", "take one from Client.Create")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.committed {
		return nil
	}
	return w.o.Close()
}

// Ensure attaches an object of a name, or has this process write it: of all that ask at the same time
// one fills it, and the others wait for its commit, or take its place if it fails or ends. fill fills
// the writer's buffer, commits it and returns what Commit returned. Ensure closes the writer, and the
// object too if fill returns an error or panics. Whether the object was there shows [Object.About]: PID is
// the process that wrote it.
func (k *Client) Ensure(ctx context.Context, d *cuda.Device, name string, o CreateOptions, fill func(context.Context, *Writer) (*Object, error)) (*Object, error) {
	const op = "broker.Client.Ensure"
	if err := k.made(op); err != nil {
		return nil, err
	}
	if fill == nil {
		return nil, errs.PeerInvalid(op, "a nil fill", "pass a function that fills the object")
	}
	o.Alone = true
	for {
		got, err := k.Attach(ctx, d, name, AttachOptions{Wait: true})
		if !errors.Is(err, ErrUnknown) {
			return got, err
		}
		w, err := k.Create(ctx, d, name, o)
		switch {
		case err == nil:
			return w.fill(ctx, op, fill)
		case errors.Is(err, ErrExists) && k.publishes(ctx, name), !errors.Is(err, ErrExists) && !errors.Is(err, ErrWriting):
			return nil, err
		}
	}
}

// publishes reports whether the name is a publication's, which is never attached.
func (k *Client) publishes(ctx context.Context, name string) bool {
	all, err := k.List(ctx)
	return err == nil && slices.ContainsFunc(all, func(l Listing) bool { return l.Name == name && l.Publication })
}

// fill has a function fill and commit the object, which is closed if the function fails.
func (w *Writer) fill(ctx context.Context, op string, f func(context.Context, *Writer) (*Object, error)) (got *Object, err error) {
	done := false
	defer func() {
		if !done {
			err = errs.Both(err, w.o.Close())
		}
	}()
	got, err = f(ctx, w)
	if err == nil && got != w.o {
		err = errs.PeerInvalid(op, "a fill that did not commit the object", "return what Writer.Commit returned")
	}
	if err != nil {
		return nil, err
	}
	done = true
	return got, nil
}
