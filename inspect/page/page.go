// Package page writes a snapshot as an HTML page: a map of the address space to zoom
// into, in groups that fold, in one file that needs no network and runs no script but its
// own. A page can compare two snapshots, and plays the history of a pool back.
package page

import (
	"crypto/sha256"
	_ "embed" // the page's parts
	"encoding/base64"
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

//go:embed layout.js
var layout string

//go:embed draw.js
var drawing string

//go:embed panels.js
var panels string

//go:embed map.js
var keys string

var (
	script = model + layout + drawing + panels + keys
	// policy lets a page run its own script and style, which it names by their hashes, and
	// fetch from where it came. Nothing that a snapshot says becomes either.
	policy = fmt.Sprintf("default-src 'none'; script-src '%s'; style-src '%s'; connect-src 'self'; base-uri 'none'; form-action 'none'", hash(script), hash(style))
)

// hash returns the source expression of a policy that permits an inline text.
func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}

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
	page := strings.NewReplacer("/*POLICY*/", policy, "/*STYLE*/", style, "/*SCRIPT*/", script).Replace(html)
	before, after, _ := strings.Cut(page, "/*DATA*/")
	for _, part := range []string{before, string(text), after} {
		if _, err := io.WriteString(w, part); err != nil {
			return fmt.Errorf("page: %w", err)
		}
	}
	return nil
}
