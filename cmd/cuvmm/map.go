package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/page"
	"github.com/cuvmm/cuvmm/inspect/serve"
)

const mapUsage = `usage: cuvmm map [flags] [SNAPSHOT [SNAPSHOT]]

Draws the GPU address space of a process: reservations, what is mapped into them,
holes, pools with their blocks, managed memory, and what is shared. A SNAPSHOT is

  a number   the process with that number, which must offer a socket (serve.Offer)
  a URL      where a process has mounted serve.Handler: http://host/debug/cuvmm/
  a file     a snapshot that -save wrote

Without one it is the only process of this user that offers a socket. Two snapshots
are compared, the earlier one first.

  cuvmm map -save before.json 4711     keep a snapshot
  cuvmm map before.json 4711           what has changed since
  cuvmm map -html map.html 4711        a page to zoom into, which needs nothing else
  cuvmm map -http localhost:0 4711     the same, which follows the process

Flags:
`

type mapFlags struct {
	save, html, http string
	asJSON           bool
	every            time.Duration
	width, rows      int
}

func drawMap(f *flag.FlagSet) func(args []string, out io.Writer, h host) (int, error) {
	var o mapFlags
	f.StringVar(&o.save, "save", "", "write the snapshot to this file and draw nothing")
	f.StringVar(&o.html, "html", "", "write a page for a browser to this file and draw nothing")
	f.StringVar(&o.http, "http", "", "serve a page that follows the process at this address until interrupted")
	f.BoolVar(&o.asJSON, "json", false, "print the snapshot, or what has changed, as JSON")
	f.DurationVar(&o.every, "every", 0, "draw again after this time, until interrupted")
	f.IntVar(&o.width, "width", 0, "cells in a row (default: what the terminal has room for)")
	f.IntVar(&o.rows, "rows", 30, "about how many rows of cells to draw")
	return func(args []string, out io.Writer, h host) (int, error) {
		if err := exclusive(f, "save", "html", "http", "json"); err != nil {
			return exitUsage, fmt.Errorf("%w, -save first, and the others on the saved file", err)
		}
		return o.run(args, out, h)
	}
}

// check returns an error if a flag has an impossible value.
func (o *mapFlags) check() error {
	switch {
	case o.every < 0:
		return fmt.Errorf("-every %v: a time is not negative", o.every)
	case o.width < 0:
		return fmt.Errorf("-width %d: use 1 or more, or 0 for what the terminal has room for", o.width)
	case o.rows < 1:
		return fmt.Errorf("-rows %d: use 1 or more", o.rows)
	}
	return nil
}

// run shows snapshots as the flags say.
func (o *mapFlags) run(args []string, out io.Writer, h host) (int, error) {
	if err := o.check(); err != nil {
		return exitUsage, err
	}
	ctx, stop := untilEnded()
	defer stop()
	h.progress.step("taking a snapshot")
	sources, err := sourcesOf(ctx, args)
	if err != nil {
		return exitFailed, err
	}
	if o.http != "" {
		h.progress.end()
		return o.serve(ctx, sources, out)
	}
	if o.asJSON {
		h.screen = nil // JSON is for programs
	}
	every := o.every
	if o.save != "" || o.html != "" {
		every = 0
	}
	err = h.repeat(ctx, out, every, func(w io.Writer) error {
		snapshots, err := readAll(ctx, sources)
		h.progress.end()
		if err != nil {
			return err
		}
		return o.show(snapshots, w, h)
	})
	if err != nil {
		return exitFailed, err
	}
	return exitOK, nil
}

// source fetches a snapshot.
type source func(ctx context.Context) (inspect.Snapshot, error)

func sourcesOf(ctx context.Context, names []string) (all []source, err error) {
	for _, name := range names {
		s, err := sourceOf(ctx, name)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	if len(all) > 0 {
		return all, nil
	}
	found, err := serve.Find(ctx)
	switch {
	case err != nil:
		return nil, err
	case len(found) == 0:
		return nil, errors.New("no process of this user offers its map: name a file or a URL, or have the program call serve.Offer")
	case len(found) > 1:
		return nil, fmt.Errorf("several processes offer their maps: name one of %s (cuvmm top says what they are)", pids(found))
	}
	return []source{ofProcess(found[0])}, nil
}

func pids(all []serve.Socket) string {
	var numbers []string
	for _, s := range all {
		numbers = append(numbers, strconv.Itoa(s.PID))
	}
	return strings.Join(numbers, ", ")
}

func sourceOf(ctx context.Context, name string) (source, error) {
	if pid, err := strconv.Atoi(name); err == nil {
		found, err := serve.Find(ctx)
		if err != nil {
			return nil, err
		}
		for _, s := range found {
			if s.PID == pid {
				return ofProcess(s), nil
			}
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("process %d offers no map to this user, and no other does: have the program call serve.Offer, and run cuvmm as its user", pid)
		}
		return nil, fmt.Errorf("process %d offers no map to this user: name one of %s (cuvmm top says what they are)", pid, pids(found))
	}
	if strings.HasPrefix(name, "http://") || strings.HasPrefix(name, "https://") {
		return within(name, snapshotTimeout, func(ctx context.Context) (inspect.Snapshot, error) { return fetch(ctx, name) }), nil
	}
	return func(context.Context) (inspect.Snapshot, error) {
		f, err := os.Open(name)
		if err != nil {
			return inspect.Snapshot{}, fmt.Errorf("%w: name the number of a process, a URL, or a file that -save wrote", err)
		}
		defer f.Close()
		s, err := inspect.Read(f)
		if err != nil {
			return s, fmt.Errorf("%s cannot be read as a snapshot that -save wrote: %w", name, err)
		}
		return s, nil
	}, nil
}

// snapshotTimeout limits the wait for a process, whose snapshot may have many blocks.
const snapshotTimeout = 30 * time.Second

// within returns a source that fails if the process that is asked has not replied in time.
// who names it in the error.
func within(who string, timeout time.Duration, ask source) source {
	return func(ctx context.Context) (inspect.Snapshot, error) {
		limited, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		s, err := ask(limited)
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			err = fmt.Errorf("%s did not reply within %v; a stopped process (state T in ps) does not", who, timeout)
		}
		return s, err
	}
}

// ofProcess returns the source of a process that offers its map.
func ofProcess(s serve.Socket) source {
	return func(ctx context.Context) (inspect.Snapshot, error) {
		got, err := within("it", snapshotTimeout, s.Snapshot)(ctx)
		if err != nil {
			err = fmt.Errorf("process %d: %w", s.PID, err)
		}
		return got, err
	}
}

// fetch gets a snapshot from a handler that is mounted at a URL.
func fetch(ctx context.Context, url string) (inspect.Snapshot, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(strings.TrimSuffix(url, "/"), "/snapshot")+"/snapshot", http.NoBody)
	if err != nil {
		return inspect.Snapshot{}, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return inspect.Snapshot{}, fmt.Errorf("%w: name the URL at which a process has mounted serve.Handler", err)
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		return inspect.Snapshot{}, fmt.Errorf("%s: %s: name the URL at which a process has mounted serve.Handler", request.URL, response.Status)
	}
	return inspect.Read(response.Body)
}

func readAll(ctx context.Context, sources []source) (all []inspect.Snapshot, err error) {
	for _, s := range sources {
		one, err := s(ctx)
		if err != nil {
			return nil, err
		}
		all = append(all, one)
	}
	return all, nil
}

// show writes one snapshot, or what differs between two.
func (o *mapFlags) show(all []inspect.Snapshot, out io.Writer, h host) error {
	last := all[len(all)-1]
	switch {
	case o.save != "":
		return toFile(o.save, last.Write)
	case o.html != "":
		return toFile(o.html, func(w io.Writer) error { return page.Write(w, all...) })
	case o.asJSON && len(all) == 1:
		return last.Write(out)
	case o.asJSON:
		return json.NewEncoder(out).Encode(inspect.Compare(all[0], last))
	}
	var text bytes.Buffer
	p := picture{out: plain{&text}, cells: &text, width: o.width, rows: o.rows, color: h.colors()}
	if p.width <= 0 {
		columns, _ := h.size()
		p.width = columns - 4
	}
	if len(all) == 1 {
		p.write(last)
	} else {
		p.compare(all[0], last)
	}
	_, err := text.WriteTo(out)
	return err
}

// compare writes how the memory's uses differ.
func (p picture) compare(before, after inspect.Snapshot) {
	title := func(s inspect.Snapshot) string {
		return fmt.Sprintf("%s (%d) on %s at %s", s.Process.Name, s.Process.PID, s.Process.Host, s.Time.Format(time.DateTime))
	}
	fmt.Fprintf(p.out, "%s, then\n%s\n", title(before), title(after))
	if before.Process != after.Process {
		fmt.Fprintln(p.out, "these are different processes: the differences below are not changes of one of them")
	} else if before.Time.After(after.Time) {
		fmt.Fprintln(p.out, "the first snapshot is the later one: name the earlier one first")
	}
	fmt.Fprintf(p.out, "physical memory: %s, then %s\nmapped: %s, then %s\nreserved: %s, then %s\n",
		size(before.Totals.AllocatedBytes), size(after.Totals.AllocatedBytes), size(before.Totals.MappedBytes), size(after.Totals.MappedBytes),
		size(before.Totals.ReservedBytes), size(after.Totals.ReservedBytes))
	changes := inspect.Compare(before, after)
	if len(changes) == 0 {
		fmt.Fprintln(p.out, "the uses of memory are the same")
	}
	for i, u := range changes {
		if i == 0 {
			fmt.Fprintln(p.out, "changes by use:")
		}
		sign := ""
		if u.Bytes > 0 {
			sign = "+"
		}
		fmt.Fprintf(p.out, "%10s %+6d  %s\n", sign+size(u.Bytes), u.Count, u.Name)
	}
}

// toFile writes what a user named: a new file, or one that is replaced. Anything else,
// such as a device or a pipe, is written in place; a link stays, and its target is
// written.
func toFile(name string, write func(w io.Writer) error) error {
	if target, err := filepath.EvalSymlinks(name); err == nil {
		name = target
	}
	if about, err := os.Lstat(name); err != nil || about.Mode().IsRegular() {
		return replace(name, write)
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o600) // creates the target of a link
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}

// replace replaces a file, or leaves it as it was if that fails.
func replace(name string, write func(w io.Writer) error) (err error) {
	f, err := os.CreateTemp(filepath.Dir(name), ".cuvmm-*")
	if err != nil {
		var of *os.PathError
		if errors.As(err, &of) {
			err = of.Err
		}
		return fmt.Errorf("%s cannot be written, nor any file beside it: %w", name, err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name()) // the first error counts
		}
	}()
	if err := errors.Join(write(f), f.Close()); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), name); err != nil {
		var of *os.LinkError
		if errors.As(err, &of) {
			err = of.Err
		}
		return fmt.Errorf("%s cannot be replaced: %w", name, err)
	}
	return nil
}

// serve serves a page that follows the process.
func (o *mapFlags) serve(ctx context.Context, sources []source, out io.Writer) (int, error) {
	if len(sources) != 1 {
		return exitUsage, errors.New("-http follows one process: compare two snapshots with -html")
	}
	l, err := net.Listen("tcp", o.http)
	if err != nil {
		return exitFailed, fmt.Errorf("-http %s: %w: use a host and a free port, as in localhost:0", o.http, err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_ = page.WriteLive(w, "snapshot") // the browser is gone
	})
	mux.HandleFunc("GET /snapshot", func(w http.ResponseWriter, r *http.Request) {
		s, err := sources[0](r.Context())
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = s.Write(w) // the browser is gone
	})
	fmt.Fprintf(out, "http://%s/ (Ctrl-C ends)\n", l.Addr())
	server := &http.Server{Handler: forHost(o.http, mux), ReadHeaderTimeout: time.Minute}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return exitFailed, err
	}
	return exitOK, nil
}

// forHost refuses requests that name another host than the one that serves the page. Otherwise
// a page of that other host could point its name here and read the map. An address is not such
// a name, so it is accepted.
func forHost(address string, next http.Handler) http.Handler {
	served, _, _ := net.SplitHostPort(address) // empty for all of this machine's
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, err := net.SplitHostPort(r.Host)
		if err != nil {
			host = strings.Trim(r.Host, "[]")
		}
		if net.ParseIP(host) == nil && !strings.EqualFold(host, "localhost") && (served == "" || !strings.EqualFold(host, served)) {
			http.Error(w, fmt.Sprintf("the map is not served as %q: name the address, or start cuvmm map -http with that name", host), http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}
