package life

import (
	"fmt"
	"strings"
	"unicode"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// Label is what a program calls an object: its name, and the tag of the group that it
// belongs to. Either may be empty.
type Label struct{ Name, Tag string }

// longest is how many bytes a name or a tag has at most: they are in errors and snapshots.
const longest = 128

// Check refuses a label that errors and snapshots cannot show on one line.
func (l Label) Check(op string) error {
	for _, part := range []struct{ what, text string }{{"Name", l.Name}, {"Tag", l.Tag}} {
		switch {
		case len(part.text) > longest:
			return errs.Invalid(op, fmt.Sprintf("a %s of %d bytes", part.what, len(part.text)), fmt.Sprintf("use at most %d bytes", longest))
		case !printable(part.text):
			return errs.Invalid(op, fmt.Sprintf("the %s %+q", part.what, part.text), "use printable UTF-8, without spaces at its ends")
		}
	}
	return nil
}

// printable reports whether text is UTF-8, shows as it is, and begins and ends with what
// can be seen.
func printable(text string) bool {
	return strings.IndexFunc(text, func(r rune) bool { return r == unicode.ReplacementChar || !unicode.IsPrint(r) }) < 0 &&
		strings.TrimSpace(text) == text
}

// String returns the label for errors: ` "weights" tagged "llm"`, with a space in front, or
// nothing.
func (l *Label) String() string {
	if l == nil {
		return ""
	}
	text := ""
	if l.Name != "" {
		text = fmt.Sprintf(" %q", l.Name)
	}
	if l.Tag != "" {
		text += fmt.Sprintf(" tagged %q", l.Tag)
	}
	return text
}

// SetLabel sets what the program calls the object. The owner calls it before it adds the
// object to a list; a label never changes.
func (o *Object) SetLabel(l Label) {
	if l != (Label{}) {
		o.label = &l
	}
}

// Label returns what the program calls the object.
func (o *Object) Label() Label {
	if o.label == nil {
		return Label{}
	}
	return *o.label
}

// Title returns the object's kind and its label, for errors: `buffer "weights"`.
func (o *Object) Title() string { return o.kind.String() + o.label.String() }

// Called returns the Title of an object that has a label, and nothing for one that has
// none.
func (o *Object) Called() string {
	if o.label == nil {
		return ""
	}
	return o.Title()
}
