// Package serve serves snapshots of a process's GPU address space: over HTTP if the
// program mounts [Handler], or over a socket that only the same user can open if it calls
// [Offer]. Importing the package does neither.
//
//	http.Handle("/debug/cuvmm/", serve.Handler(sys))
//
// Snapshots disclose sizes, addresses, the names of tags and publications, and the
// program's stacks. Mount the handler on a server that only operators reach, like
// net/http/pprof.
package serve

import (
	"bytes"
	"io"
	"net/http"
	"path"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/page"
	"github.com/cuvmm/cuvmm/inspect/profile"
	"github.com/cuvmm/cuvmm/inspect/torch"
)

// Handler returns a handler for all paths below the one that it is mounted at, which
// ends with a slash:
//
//	(nothing)  a page with the map of the address space, which follows the process
//	snapshot   a snapshot as JSON: see inspect.Snapshot
//	summary    the same without lists of objects: see inspect.Summarize
//	profile    the snapshot for go tool pprof: see inspect/profile
//	torch      the same for PyTorch's memory viewer: see inspect/torch
//
// The handler is safe for concurrent use. It may outlive the System, and then shows what
// is left of it.
func Handler(sys *cuda.System) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := ""
		if !strings.HasSuffix(r.URL.Path, "/") {
			name = path.Base(r.URL.Path)
		}
		f, known := forms[name]
		switch {
		case r.Method == http.MethodPost && !known:
			http.Error(w, "only GET: the program has not called serve.OfferSleep", http.StatusNotFound)
			return
		case !known:
			http.NotFound(w, r)
			return
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "only GET", http.StatusMethodNotAllowed)
			return
		}
		var body bytes.Buffer // so that an error replaces the body
		if err := f.write(sys, &body); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		h := w.Header()
		h.Set("Content-Type", f.content)
		h.Set("Cache-Control", "no-store")
		h.Set("X-Content-Type-Options", "nosniff")
		_, _ = body.WriteTo(w) // an error means that the client is gone
	})
}

// form is a representation of a System.
type form struct {
	content string
	write   func(sys *cuda.System, w io.Writer) error
}

var forms = map[string]form{
	"":         {"text/html; charset=utf-8", func(_ *cuda.System, w io.Writer) error { return page.WriteLive(w, "snapshot") }},
	"snapshot": {"application/json", of(inspect.Take, inspect.Snapshot.Write)},
	"summary":  {"application/json", of(inspect.Summarize, inspect.Snapshot.Write)},
	"profile":  {"application/octet-stream", of(inspect.Take, func(s inspect.Snapshot, w io.Writer) error { return profile.Write(w, s) })},
	"torch":    {"application/octet-stream", of(inspect.Take, func(s inspect.Snapshot, w io.Writer) error { return torch.Write(w, s) })},
}

// of returns a function that takes a snapshot and writes it.
func of(take func(*cuda.System) (inspect.Snapshot, error), write func(s inspect.Snapshot, w io.Writer) error) func(*cuda.System, io.Writer) error {
	return func(sys *cuda.System, w io.Writer) error {
		s, err := take(sys)
		if err != nil {
			return err
		}
		return write(s, w)
	}
}
