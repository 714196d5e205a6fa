package load

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/disk"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// blockBytes is what large tensors are aligned to in files that are saved: direct reads of
// every disk can begin there.
const blockBytes = 4 << 10

// saveThreads is how many threads write: file systems let one at a time write a file, and the
// others wait by spinning.
const saveThreads = 4

// Saving is a tensor to save.
type Saving struct {
	Name    string
	Element handles.ElementType
	Shape   []int
	// From is the address of its contiguous elements.
	From cuda.Ptr
	// Strides are those of the manifest, if it has any: such a tensor is not contiguous, and is refused.
	Strides []int
}

// SavingsOf returns the tensors of memory that begins at an address.
func SavingsOf(l *handles.Manifest, at cuda.Ptr) []Saving {
	all := make([]Saving, len(l.Tensors))
	for i, t := range l.Tensors {
		all[i] = Saving{t.Name, t.Element, t.Shape, at + cuda.Ptr(t.Offset), t.Strides}
	}
	return all
}

// SaveOptions are how SaveSafetensors runs. The zero value is good.
type SaveOptions struct {
	// Metadata is what the header says beside the tensors. Some readers want "format": "pt".
	Metadata map[string]string
	// NoDigests leaves the digests out of the file.
	NoDigests bool
	// Threads is how many threads write; 0 chooses.
	Threads int
	// Progress is that of Options.
	Progress func(Progress)
}

// SaveSafetensors writes a file in the safetensors format from GPU memory, once the work that is
// on the stream is done. Tensors whose size is a multiple of 4 KiB begin at one; the others follow,
// since the format allows no gaps. The header has a digest of each tensor, which loads compare.
//
// The file is written beside the path under another name (.NAME.*.partial), with its space
// reserved first, and takes the path's name once all of it is on the disk: a file that was there
// before stays whole until then. A process that is killed leaves the other name behind. After an
// error that is removed, and the path is as it was.
func SaveSafetensors(ctx context.Context, o SaveOptions, on *cuda.Stream, path string, tensors ...Saving) error {
	const op = "load.SaveSafetensors"
	s, err := newSave(op, o, tensors)
	if err != nil {
		return err
	}
	in := Options{Threads: cmp.Or(o.Threads, saveThreads), Progress: o.Progress}
	st, err := usable(ctx, op, in, on, s.from)
	if err != nil {
		return err
	}
	if s.file, err = disk.Replace(filepath.Dir(path), filepath.Base(path), s.start+s.bytes); err != nil {
		return saveError(op, path, err)
	}
	err = in.copies(op, st, func(b bulk.Options) error { return bulk.Of(st.Ctx).Drain(ctx, s.from, s.write, b) })
	if err == nil {
		err = s.writeHeader()
	}
	if err != nil {
		err = errors.Join(err, s.file.Abandon())
	} else {
		err = s.file.Commit()
	}
	if err != nil {
		return saveError(op, path, err)
	}
	return nil
}

// saveError adds path and remedy to the errors of the operating system.
func saveError(op, path string, err error) error {
	var number syscall.Errno
	if !errors.As(err, &number) {
		return err
	}
	e := ioError(op, path, "", err)
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		e.Hint = "free space on its file system, or save elsewhere"
	case errors.Is(err, fs.ErrNotExist):
		e.Hint = "make its folder first"
	case errors.Is(err, fs.ErrPermission):
		e.Hint = "let this user write its folder"
	case errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.EEXIST):
		e.Hint = "name a file, not a folder"
	}
	return e
}

// save is a file that is being written.
type save struct {
	file  *disk.Replacement
	items []item // in the order of the file
	from  []bulk.Segment
	start int64 // of the data
	bytes int64 // of the data
	// text is the header, with zeros for the digests, which begin at byte digests of it.
	text    []byte
	digests int
	sums    *sums
}

// newSave checks the tensors, and lays out the file.
func newSave(op string, o SaveOptions, tensors []Saving) (*save, error) {
	s := &save{}
	checked := handles.Manifest{}
	for _, t := range tensors {
		c := handles.Tensor{Name: t.Name, Element: t.Element, Shape: t.Shape, Offset: checked.Bytes}
		switch {
		case dtypeOf(t.Element) == "":
			return nil, errs.Invalid(op, fmt.Sprintf("tensor %s with elements of type %v", errs.Words(t.Name), t.Element), "save elements of a type that the format has")
		case t.Name == metadataKey:
			return nil, errs.Invalid(op, "a tensor named "+metadataKey, "name it otherwise: the format has that for something else")
		case len(t.Strides) > 0:
			return nil, errs.Invalid(op, fmt.Sprintf("tensor %s with strides %v", errs.Words(t.Name), t.Strides), "save a contiguous copy: the format has no strides")
		case t.From == 0 && c.Size() > 0:
			return nil, errs.Invalid(op, fmt.Sprintf("tensor %s without an address", errs.Words(t.Name)), "set From")
		}
		checked.Tensors = append(checked.Tensors, c)
		if checked.Bytes += min(c.Size(), 1<<60-checked.Bytes); checked.Bytes == 1<<60 {
			break
		}
	}
	if err := checked.Validate(); err != nil {
		return nil, err
	}
	for i, t := range checked.Tensors {
		n := int64(t.Size())
		s.items = append(s.items, item{block: block{bytes: n}, tensor: &tensor{Tensor: t}, part: i})
	}
	slices.SortStableFunc(s.items, func(a, b item) int {
		return cmp.Or(cmp.Compare(class(a), class(b)), cmp.Compare(b.tensor.Element.Size(), a.tensor.Element.Size()), cmp.Compare(a.tensor.Name, b.tensor.Name))
	})
	for i := range s.items {
		it := &s.items[i]
		it.start = s.bytes
		s.bytes += it.bytes
		s.from = append(s.from, bulk.Segment{Ptr: driver.Ptr(tensors[it.part].From), Bytes: uint64(it.bytes)})
	}
	if !o.NoDigests {
		s.sums = &sums{items: s.items, whole: func(item int, crc uint32) { copy(s.text[s.digests+8*item:], fmt.Sprintf("%08x", crc)) }}
	}
	s.makeHeader(o)
	if len(s.text)-lengthBytes > maxHeader {
		return nil, errs.Invalid(op, fmt.Sprintf("%s with a header of %s", errs.Count(len(tensors), "tensor"), errs.Bytes(len(s.text))),
			fmt.Sprintf("save several files: the format allows a header of %d bytes", maxHeader))
	}
	return s, nil
}

// class orders tensors: empty ones come first, then those that fill whole blocks.
func class(it item) int {
	switch {
	case it.bytes == 0:
		return 0
	case it.bytes%blockBytes == 0:
		return 1
	}
	return 2
}

func dtypeOf(e handles.ElementType) string {
	for name, is := range dtypes {
		if is == e {
			return name
		}
	}
	return ""
}

// makeHeader makes the text with its length before it, padded so that the data begins at a
// block.
func (s *save) makeHeader(o SaveOptions) {
	quote := func(text string) string {
		q, _ := json.Marshal(text) // of a string it does not fail
		return string(q)
	}
	var fields []string
	for _, key := range slices.Sorted(maps.Keys(o.Metadata)) {
		if key != digestsKey {
			fields = append(fields, quote(key)+":"+quote(o.Metadata[key]))
		}
	}
	var b strings.Builder
	b.WriteString(strings.Repeat("\x00", lengthBytes) + "{" + quote(metadataKey) + ":{")
	if s.sums != nil {
		b.WriteString(quote(digestsKey) + `:"`)
		s.digests = b.Len()
		b.WriteString(strings.Repeat("0", 8*len(s.items)) + `"`)
		if len(fields) > 0 {
			b.WriteString(",")
		}
	}
	b.WriteString(strings.Join(fields, ",") + "}")
	for i := range s.items {
		it := &s.items[i]
		shape, _ := json.Marshal(append([]int{}, it.tensor.Shape...)) // nor does this
		fmt.Fprintf(&b, `,%s:{"dtype":"%s","shape":%s,"data_offsets":[%d,%d]}`, quote(it.tensor.Name), dtypeOf(it.tensor.Element), shape, it.start, it.start+it.bytes)
	}
	b.WriteString("}")
	b.WriteString(strings.Repeat(" ", -b.Len()&(blockBytes-1)))
	s.text = []byte(b.String())
	s.start = int64(len(s.text))
	binary.LittleEndian.PutUint64(s.text, uint64(s.start-lengthBytes))
}

// write is a bulk.Write.
func (s *save) write(ctx context.Context, piece []byte, offset uint64) error {
	if s.sums != nil {
		s.sums.addPiece(piece, int64(offset))
	}
	for done := 0; done < len(piece); done += stepBytes {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if _, err := s.file.WriteAt(piece[done:min(done+stepBytes, len(piece))], s.start+int64(offset)+int64(done)); err != nil {
			return err
		}
	}
	return nil
}

func (s *save) writeHeader() error {
	if s.sums != nil {
		s.sums.end()
	}
	_, err := s.file.WriteAt(s.text, 0)
	return err
}
