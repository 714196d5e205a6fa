package load

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/disk"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Names that a folder of a model has.
const (
	indexName  = "model.safetensors.index.json"
	singleName = "model.safetensors"
)

// Model is the tensors of a file, or of the files of a folder. All methods are safe for
// concurrent use.
type Model struct {
	files    []*file
	tensors  []tensor // by file, and by place in it
	byName   map[string]int
	metadata map[string]string

	running sync.RWMutex // held for reading by loads
	closed  bool
}

// file is a file of a model.
type file struct {
	contents
	path  string
	state disk.State // when it was opened
}

// contents are a *disk.File.
type contents interface {
	State() (disk.State, error)
	Align() int
	Cached(p []byte, offset int64) (n int, known bool)
	ReadAt(p []byte, offset int64) error
	ReadDirect(p []byte, offset int64) (n int, err error)
	Close() error
}

// tensor is a tensor of a model. Its offset counts from the start of its file.
type tensor struct {
	handles.Tensor
	file  *file
	index int // in Model.tensors
}

// Tensor is a tensor of a Model. Its Offset counts from the start of File.
type Tensor struct {
	handles.Tensor
	File string
}

// OpenSafetensors opens a file in the safetensors format, or a folder: one with
// model.safetensors.index.json, which says in which of its files each tensor is, or one with
// model.safetensors. It reads the headers alone, and checks all of them. The caller closes the
// model.
func OpenSafetensors(path string) (*Model, error) {
	const op = "load.OpenSafetensors"
	m := &Model{byName: map[string]int{}}
	info, err := os.Stat(path)
	switch {
	case err != nil:
		err = openError(op, path, err)
	case info.IsDir():
		err = m.openFolder(op, path)
	default:
		m.tensors, err = m.open(op, path)
	}
	if err != nil {
		return nil, errors.Join(err, m.Close())
	}
	for i := range m.tensors {
		m.tensors[i].index, m.byName[m.tensors[i].Name] = i, i
	}
	return m, nil
}

func openError(op, path string, err error) error {
	e := ioError(op, path, "", err)
	switch {
	case errors.Is(err, disk.ErrNotFile):
		e.kind, e.cause, e.Asked, e.Hint = ErrFormat, nil, disk.ErrNotFile.Error(), "pass a file, or a folder with files"
	case errors.Is(err, fs.ErrNotExist):
		e.Hint = "check the path, and that the download is complete"
	case errors.Is(err, fs.ErrPermission):
		e.Hint = "let this user read it"
	}
	return e
}

// open opens a file, which the model closes, and returns its tensors.
func (m *Model) open(op, path string) ([]tensor, error) {
	in, err := disk.Open(path)
	if err != nil {
		return nil, openError(op, path, err)
	}
	f := &file{contents: in, path: path}
	m.files = append(m.files, f)
	if f.state, err = in.State(); err != nil {
		return nil, ioError(op, path, "", err)
	}
	h, err := readHeader(in, f.state.Bytes)
	if err != nil {
		var bad *Error
		if errors.As(err, &bad) {
			return nil, bad.of(op, path)
		}
		return nil, ioError(op, path, "the header", err)
	}
	if m.metadata == nil {
		m.metadata = map[string]string{}
	}
	for k, v := range h.metadata {
		if _, there := m.metadata[k]; !there && k != digestsKey {
			m.metadata[k] = v
		}
	}
	tensors := make([]tensor, len(h.tensors))
	for i, t := range h.tensors {
		tensors[i] = tensor{Tensor: t, file: f}
	}
	return tensors, nil
}

// openFolder opens the files that the folder's index names.
func (m *Model) openFolder(op, folder string) error {
	index := filepath.Join(folder, indexName)
	places, err := readIndex(op, index)
	if errors.Is(err, fs.ErrNotExist) {
		if m.tensors, err = m.open(op, filepath.Join(folder, singleName)); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return &Error{Op: op, File: folder, Asked: fmt.Sprintf("a folder with neither %s nor %s", indexName, singleName),
			Hint: "fetch the index too, or open a file by its name", kind: ErrFormat, cause: fs.ErrNotExist}
	}
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(places)) {
		path := filepath.Join(folder, name)
		tensors, err := m.open(op, path)
		if err != nil {
			return err
		}
		wanted := places[name]
		for _, t := range tensors { // others, which the index does not name or has elsewhere, are no part of the model
			if wanted[t.Name] {
				m.tensors = append(m.tensors, t)
				delete(wanted, t.Name)
			}
		}
		if len(wanted) > 0 {
			missing := slices.Min(slices.Collect(maps.Keys(wanted)))
			return badHeader(missing, "the index %s places it in this file, which lacks it", indexName).of(op, path)
		}
	}
	return nil
}

// readIndex returns the tensors of each file that an index names.
func readIndex(op, path string) (map[string]map[string]bool, error) {
	bad := func(tensor, format string, args ...any) error { return badHeader(tensor, format, args...).of(op, path) }
	f, err := disk.Open(path)
	if err != nil {
		return nil, openError(op, path, err)
	}
	defer func() { _ = f.Close() }() // it was only read
	s, err := f.State()
	if err != nil {
		return nil, ioError(op, path, "", err)
	}
	if s.Bytes > maxHeader {
		return nil, bad("", "an index of %s, where %s are allowed", errs.Bytes(s.Bytes), errs.Bytes(maxHeader))
	}
	text := make([]byte, s.Bytes)
	if err := f.ReadAt(text, 0); err != nil {
		return nil, ioError(op, path, "", err)
	}
	var index struct {
		Places map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(text, &index); err != nil {
		return nil, bad("", "%v", err)
	}
	if len(index.Places) == 0 {
		return nil, bad("", "no weight_map, or an empty one")
	}
	files := map[string]map[string]bool{}
	for name, in := range index.Places {
		if in == "" || in == "." || in == ".." || filepath.Base(in) != in || !filepath.IsLocal(in) {
			return nil, bad(name, "it is in the file %s, which is not a name in the folder", errs.Words(in))
		}
		if files[in] == nil {
			files[in] = map[string]bool{}
		}
		files[in][name] = true
	}
	return files, nil
}

// Tensors returns the tensors, by file, and by place in it.
func (m *Model) Tensors() []Tensor {
	all := make([]Tensor, len(m.tensors))
	for i, t := range m.tensors {
		all[i] = Tensor{t.copied(), t.file.path}
	}
	return all
}

func (t *tensor) copied() handles.Tensor {
	c := t.Tensor
	c.Shape = slices.Clone(c.Shape)
	return c
}

// Metadata returns what the headers say beside the tensors. If several files have a key, the
// first one's value counts.
func (m *Model) Metadata() map[string]string { return maps.Clone(m.metadata) }

// leastAlign is what every element type can be read at.
const leastAlign = 16

// Layout returns how all tensors fit into one range of memory, each at a multiple of align: a
// power of two from 16 up, or 0 for 256. Model.LoadAll fills such memory. Digests are those that
// the files have.
func (m *Model) Layout(align int) (*handles.Manifest, error) {
	if align == 0 {
		align = 256
	}
	if align < leastAlign || align&(align-1) != 0 || align > 1<<30 {
		return nil, errs.Invalid("load.Model.Layout", fmt.Sprintf("an alignment of %d", align), "use a power of two from 16 to 1 GiB, or 0")
	}
	l := &handles.Manifest{Tensors: make([]handles.Tensor, len(m.tensors))}
	for i := range m.tensors {
		t := m.tensors[i].copied()
		t.Offset = (l.Bytes + align - 1) &^ (align - 1)
		l.Tensors[i], l.Bytes = t, t.Offset+t.Size()
	}
	if err := l.Validate(); err != nil {
		return nil, err
	}
	return l, nil
}

// Close closes the files. It waits for loads that run. Idempotent.
func (m *Model) Close() error {
	m.running.Lock()
	defer m.running.Unlock()
	m.closed = true
	var all error
	for _, f := range m.files {
		all = errors.Join(all, f.Close())
	}
	m.files = nil
	return all
}

// enter begins an operation that reads, and ends with leave.
func (m *Model) enter(op string) error {
	m.running.RLock()
	if m.closed {
		m.running.RUnlock()
		return errs.ClosedError(op, "model")
	}
	return nil
}

func (m *Model) leave() { m.running.RUnlock() }

// unchanged requires that no file was written since it was opened.
func (m *Model) unchanged(op string) error {
	for _, f := range m.files {
		now, err := f.State()
		if err != nil {
			return ioError(op, f.path, "", err)
		}
		if now.Bytes != f.state.Bytes || !now.Modified.Equal(f.state.Modified) {
			return f.changed(op, fmt.Sprintf("%s, modified %v; it had %s, modified %v", errs.Bytes(now.Bytes), now.Modified, errs.Bytes(f.state.Bytes), f.state.Modified))
		}
	}
	return nil
}

func (f *file) changed(op, what string) *Error {
	return &Error{Op: op, File: f.path, Asked: what, Hint: "open the model again, once nothing writes the file", kind: ErrChanged}
}
