// Package page writes a snapshot as an HTML page: a map of the address space to zoom
// into, in one file that needs no network. A page can compare two snapshots, and plays
// the history of a pool back.
package page

import (
	_ "embed" // the page's parts
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/cuvmm/cuvmm/inspect"
)

//go:embed map.html
var html string

//go:embed map.css
var style string

//go:embed model.js
var model string

//go:embed draw.js
var drawing string

//go:embed map.js
var script string

// Write writes a page of one snapshot, or of two to compare: the earlier one first.
func Write(w io.Writer, snapshots ...inspect.Snapshot) error {
	if n := len(snapshots); n != 1 && n != 2 {
		return fmt.Errorf("page: %d snapshots: a page shows one, or compares two", n)
	}
	return write(w, struct {
		Snapshots []inspect.Snapshot `json:"snapshots"`
	}{snapshots})
}

// WriteLive writes a page that fetches snapshots again and again, in the form of
// inspect.Snapshot.Write, from a URL relative to its own.
func WriteLive(w io.Writer, source string) error {
	if source == "" {
		return errors.New("page: no address to fetch snapshots from")
	}
	return write(w, struct {
		Source string `json:"source"`
	}{source})
}

func write(w io.Writer, data any) error {
	text, err := json.Marshal(data) // escapes <, so that no text ends the element
	if err != nil {
		return fmt.Errorf("page: %w", err)
	}
	page := strings.NewReplacer("/*STYLE*/", style, "/*SCRIPT*/", model+drawing+script).Replace(html)
	before, after, _ := strings.Cut(page, "/*DATA*/")
	for _, part := range []string{before, string(text), after} {
		if _, err := io.WriteString(w, part); err != nil {
			return fmt.Errorf("page: %w", err)
		}
	}
	return nil
}
