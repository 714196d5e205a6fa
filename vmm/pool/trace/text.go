package trace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
)

// The text form is a JSON object a line: first the trace's name and streams,
// then the operations.
//
//	{"trace":"training-1","streams":1,"tags":["weights"]}
//	{"op":"alloc","id":0,"bytes":4096,"stream":0,"tag":"weights"}
//	{"op":"use","id":0,"stream":0}
//	{"op":"free","id":0}
//	{"op":"sync"}
type textHeader struct {
	Trace   *string  `json:"trace"`
	Streams int      `json:"streams"`
	Tags    []string `json:"tags"`
}

type textOp struct {
	Op     string  `json:"op"`
	ID     *uint32 `json:"id,omitempty"`
	Bytes  *int    `json:"bytes,omitempty"`
	Stream *uint32 `json:"stream,omitempty"`
	Tag    *string `json:"tag,omitempty"`
}

// longestLine holds a header with all the tags that a trace can have, each byte
// of them escaped.
const longestLine = 8 * MaxText * MaxTags

// WriteText writes the text form. It returns the error of Check for a trace that
// makes no sense, having written nothing.
func (t *Trace) WriteText(w io.Writer) error {
	if err := t.Check(); err != nil {
		return err
	}
	buffered := bufio.NewWriter(w)
	e := json.NewEncoder(buffered)
	tags := t.Tags
	if tags == nil {
		tags = []string{}
	}
	if err := e.Encode(textHeader{&t.Name, t.Streams, tags}); err != nil {
		return err
	}
	for _, op := range t.Ops {
		line := textOp{Op: op.Kind.String()}
		if op.Kind != Sync {
			line.ID = &op.ID
		}
		if op.Kind == Alloc || op.Kind == Use {
			line.Stream = &op.Stream
		}
		if op.Kind == Alloc {
			line.Bytes, line.Tag = &op.Bytes, &t.Tags[op.Tag]
		}
		if err := e.Encode(line); err != nil {
			return err
		}
	}
	return buffered.Flush()
}

// ReadText reads the text form to the end of r. Fields that it does not know,
// and fields that an operation does not have, are errors.
func ReadText(r io.Reader) (*Trace, error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, longestLine)
	var t *Trace
	tags := map[string]uint32{}
	for n := 1; lines.Scan(); n++ {
		var err error
		if t == nil {
			t, err = readHeader(lines.Bytes(), tags)
		} else {
			err = t.readOp(lines.Bytes(), tags)
		}
		if err != nil {
			return nil, fmt.Errorf("reading a trace, line %d: %w", n, err)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("reading a trace: %w", err)
	}
	if t == nil {
		return nil, errors.New("reading a trace: it has no line")
	}
	if err := t.Check(); err != nil {
		return nil, fmt.Errorf("reading a trace: %w", err)
	}
	return t, nil
}

func readHeader(line []byte, tags map[string]uint32) (*Trace, error) {
	var h textHeader
	if err := strict(line, &h); err != nil {
		return nil, err
	}
	if h.Trace == nil {
		return nil, errors.New("the first line is not the header of a trace")
	}
	for i, tag := range h.Tags {
		tags[tag] = uint32(i)
	}
	return &Trace{Name: *h.Trace, Streams: h.Streams, Tags: h.Tags}, nil
}

func (t *Trace) readOp(line []byte, tags map[string]uint32) error {
	var l textOp
	if err := strict(line, &l); err != nil {
		return err
	}
	if uint64(len(t.Ops)) == math.MaxUint32 {
		return errors.New("more operations than can be numbered")
	}
	var op Op
	switch l.Op {
	case "alloc":
		op.Kind = Alloc
	case "free":
		op.Kind = Free
	case "use":
		op.Kind = Use
	case "sync":
		op.Kind = Sync
	default:
		return fmt.Errorf("unknown operation %.20q", l.Op)
	}
	alloc := op.Kind == Alloc
	if (l.ID != nil) != (op.Kind != Sync) || (l.Stream != nil) != (alloc || op.Kind == Use) || (l.Bytes != nil) != alloc || (l.Tag != nil) != alloc {
		return fmt.Errorf("%v lacks a field, or has one of another operation", op.Kind)
	}
	if l.ID != nil {
		op.ID = *l.ID
	}
	if l.Stream != nil {
		op.Stream = *l.Stream
	}
	if alloc {
		tag, known := tags[*l.Tag]
		if !known {
			return fmt.Errorf("tag %.40q, which the header does not name", *l.Tag)
		}
		op.Bytes, op.Tag = *l.Bytes, tag
	}
	t.Ops = append(t.Ops, op)
	return nil
}

func strict(line []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if d.More() {
		return errors.New("more than one value on the line")
	}
	return nil
}
