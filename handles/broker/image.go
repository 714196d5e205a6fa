package broker

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/load"
)

// The metadata of an image: what a file of tensors does not say of an object.
const (
	imageName     = "cuvmm.object"
	imageDevice   = "cuvmm.device"
	imageManifest = "cuvmm.manifest" // for the places of the tensors
)

// Save writes an image of the object: a file in the safetensors format with its tensors, which any
// reader of the format takes and [Client.Load] makes an object of again, with every tensor at its
// place. Digests of the manifest are compared first (load.ErrDigest), so that an image has what was
// committed. An object whose manifest has no tensors is cuda.ErrNotSupported. The file replaces one of
// that path when it is complete: see load.SaveSafetensors.
func (o *Object) Save(ctx context.Context, path string) error {
	const op = "broker.Object.Save"
	return o.reading(op, false, func(s *cuda.Stream) error {
		if _, err := load.Verify(ctx, load.Options{}, s, &o.manifest, o.buffer.Ptr()); err != nil {
			return err
		}
		text, err := o.manifest.MarshalBinary()
		if err != nil {
			return err
		}
		return load.SaveSafetensors(ctx, load.SaveOptions{Metadata: map[string]string{
			imageName: o.About().Name, imageDevice: o.About().Device.String(), imageManifest: string(text),
		}}, s, path, load.SavingsOf(&o.manifest, o.buffer.Ptr())...)
	})
}

// ImageOf returns the name of the object that a file, or a folder, is an image of, and the UUID of the
// device that had it, as cuda.UUID.String writes it. Both are empty for a file that is no image.
func ImageOf(m *load.Model) (name, device string) {
	meta := m.Metadata()
	return meta[imageName], meta[imageDevice]
}

// Load is [Client.Ensure] with the tensors of a file in the safetensors format, or of a folder of such
// files: it attaches the object of that name, or has this process load it. An image ([Object.Save])
// becomes what it was; the tensors of other files are laid out as load.Model.Layout does. Every digest
// that the file declares is compared. CreateOptions.Bytes is not used.
func (k *Client) Load(ctx context.Context, d *cuda.Device, name, path string, o CreateOptions) (got *Object, err error) {
	const op = "broker.Client.Load"
	if got, err = k.Attach(ctx, d, name, AttachOptions{Wait: true}); !errors.Is(err, ErrUnknown) {
		return got, err // even if the file has gone
	}
	m, err := load.OpenSafetensors(path)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err = errs.Both(err, m.Close()); err != nil && got != nil {
			err = errs.Both(err, got.Close())
			got = nil
		}
	}()
	l, err := layoutOf(op, path, m)
	if err != nil {
		return nil, err
	}
	if o.Bytes = l.Bytes; l.Bytes == 0 {
		return nil, errs.PeerInvalid(op, fmt.Sprintf("file %s, whose tensors are empty", errs.Plain(path)), "load a file with data")
	}
	return k.Ensure(ctx, d, name, o, func(ctx context.Context, w *Writer) (*Object, error) {
		s, err := d.NewStream(cuda.StreamOptions{})
		if err != nil {
			return nil, err
		}
		made, err := loadTied(ctx, m, s, l, w.Buffer().Ptr())
		if err = errs.Both(err, s.Close()); err != nil {
			return nil, err
		}
		return w.Commit(ctx, made)
	})
}

// loadTied is load.Model.LoadAll for a layout whose tensors may share memory. The file has the bytes of
// each, so those that share any with an earlier one are loaded by themselves.
func loadTied(ctx context.Context, m *load.Model, s *cuda.Stream, l *handles.Manifest, at cuda.Ptr) (*handles.Manifest, error) {
	apart := &handles.Manifest{Bytes: l.Bytes}
	var tied []int
	end := 0
	for i, t := range l.Tensors {
		if t.Offset < end {
			tied = append(tied, i)
			continue
		}
		apart.Tensors, end = append(apart.Tensors, t), t.Offset+t.Size()
	}
	made, err := m.LoadAll(ctx, load.Options{}, s, apart, at, l.Bytes)
	if err != nil || len(tied) == 0 {
		return made, err
	}
	whole := &handles.Manifest{Bytes: l.Bytes, Tensors: slices.Clone(l.Tensors)}
	digests := map[string]string{}
	for _, t := range made.Tensors {
		digests[t.Name] = t.Digest
	}
	for _, i := range tied {
		t := &l.Tensors[i]
		part, err := m.Part(t.Name)
		if err != nil {
			return nil, err
		}
		sum, err := m.Load(ctx, load.Options{}, s, part.To(at+cuda.Ptr(t.Offset), t.Size()))
		if err != nil {
			return nil, err
		}
		digests[t.Name] = sum[0]
	}
	for i := range whole.Tensors {
		whole.Tensors[i].Digest = digests[whole.Tensors[i].Name]
	}
	return whole, nil
}

// layoutOf returns where the tensors of a model belong.
func layoutOf(op, path string, m *load.Model) (*handles.Manifest, error) {
	text, is := m.Metadata()[imageManifest]
	if !is {
		return m.Layout(0)
	}
	l := new(handles.Manifest)
	err := l.UnmarshalBinary([]byte(text))
	if err == nil && len(l.Tensors) != len(m.Tensors()) {
		err = errors.New("it has other tensors than the file")
	}
	if err != nil {
		return nil, errs.PeerCause(err, op, handles.ErrManifest, fmt.Sprintf("the metadata %s of file %s", imageManifest, errs.Plain(path)), "save the object anew, or leave that metadata out")
	}
	for i := range l.Tensors {
		l.Tensors[i].Digest = "" // the file has them
	}
	return l, nil
}
