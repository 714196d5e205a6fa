package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/internal/environ"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/sock"
)

// Offered is a socket that serves snapshots of a System. The caller closes it.
type Offered struct {
	dir    *sock.Dir
	path   string
	entry  sock.Entry
	server *http.Server
	done   chan struct{}
	once   sync.Once
	err    error
}

// locking bounds how long a process waits for another that makes or removes a socket.
const locking = 10 * time.Second

// serials number the sockets of this process.
var serials atomic.Int64

// Offer serves [Handler] on a new socket in [Folder], for programs of the same user such
// as cuvmm map and cuvmm top. It works on Linux; elsewhere it returns
// cuda.ErrNotSupported.
func Offer(sys *cuda.System) (*Offered, error) { return offer("serve.Offer", Handler(sys)) }

func offer(op string, handler http.Handler) (*Offered, error) {
	folder := Folder()
	dir, err := private(folder, true)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	o := &Offered{dir: dir, done: make(chan struct{}),
		server: &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}}
	var l net.Listener
	for {
		name := fmt.Sprintf("%d-%d.sock", os.Getpid(), serials.Add(1))
		o.path = filepath.Join(folder, name)
		o.entry, err = dir.Bind(name, locking, func() (err error) {
			l, err = sock.ListenStream(dir, name)
			return err
		})
		var served *sock.ServedError // by a process of this number in another namespace
		if !errors.As(err, &served) && !errors.Is(err, sock.ErrNotSocket) {
			break
		}
	}
	if err != nil {
		if l != nil {
			_ = l.Close()
		}
		_ = dir.Close()
		return nil, fmt.Errorf("%s: socket %q: %w", op, o.path, err)
	}
	go func() {
		defer close(o.done)
		_ = o.server.Serve(l) // until Close
	}()
	return o, nil
}

// Path returns the path of the socket.
func (o *Offered) Path() string { return o.path }

// Close ends requests in flight and removes the socket. Idempotent.
func (o *Offered) Close() error {
	o.once.Do(func() {
		o.err = o.dir.Unbind(filepath.Base(o.path), o.entry, locking)
		o.err = errors.Join(o.err, o.server.Close(), o.dir.Close())
		<-o.done
	})
	return o.err
}

// Folder returns the folder of the sockets: cuvmm in XDG_RUNTIME_DIR, or if that is
// no absolute path in /run/user/UID, or if there is none cuvmm-UID in the folder for
// temporary files. [Offer] and [Find] refuse a folder that belongs to another user, or
// that other users may enter. A program that runs with more rights than its caller takes
// neither folder from the caller, and UID is the number of the user whose rights it has.
func Folder() string {
	if dir := environ.Get("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "cuvmm")
	}
	user := strconv.Itoa(os.Geteuid())
	run := filepath.Join("/run/user", user)
	if dir, err := private(run, false); err == nil {
		_ = dir.Close()
		return filepath.Join(run, "cuvmm")
	}
	return filepath.Join(environ.TempDir(), "cuvmm-"+user)
}

const remedy = "set XDG_RUNTIME_DIR to a folder of this user that can be written to"

// private opens a folder, and returns an error unless it is this user's alone.
func private(folder string, create bool) (*sock.Dir, error) {
	var make os.FileMode
	if create {
		make = 0o700
	}
	dir, err := sock.OpenDir(folder, make)
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return nil, fmt.Errorf("%w: a socket in %s: mount serve.Handler instead", cuda.ErrNotSupported, folder)
	case sock.NoDir(err):
		return nil, fmt.Errorf("%s is not a folder: "+remedy, folder)
	case err != nil:
		return nil, fmt.Errorf("%w: "+remedy, err)
	case dir.Mode&0o077 != 0:
		err = fmt.Errorf("%s has mode %#o, so other users may enter it: make it 0700, or "+remedy, folder, dir.Mode.Perm())
	case int(dir.Owner) != os.Geteuid():
		err = fmt.Errorf("%s belongs to another user: "+remedy, folder)
	}
	if err != nil {
		_ = dir.Close()
		return nil, err
	}
	return dir, nil
}

// Socket is the socket of a process that offers a System.
type Socket struct {
	PID  int
	Path string
}

// Find returns the sockets of this user's processes, in order of their names. It removes
// the sockets of dead processes.
func Find(ctx context.Context) ([]Socket, error) {
	folder := Folder()
	dir, err := private(folder, false)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, cuda.ErrNotSupported) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("serve.Find: %w", err)
	}
	defer func() { _ = dir.Close() }()
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, fmt.Errorf("serve.Find: %w: "+remedy, err)
	}
	var all []Socket
	for _, e := range entries {
		number, _, _ := strings.Cut(e.Name(), "-")
		pid, err := strconv.Atoi(number)
		if err != nil || !strings.HasSuffix(e.Name(), ".sock") {
			continue
		}
		s := Socket{PID: pid, Path: filepath.Join(folder, e.Name())}
		conn, err := s.dial(ctx)
		if err == nil {
			_ = conn.Close()
		} else if !sock.NotListening(err) {
			continue
		} else if err := dir.RemoveStale(e.Name(), locking); !errors.As(err, new(*sock.ServedError)) {
			continue // it is removed, or is no socket
		}
		all = append(all, s) // the process lives
	}
	return all, ctx.Err()
}

func (s Socket) dial(ctx context.Context) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "unix", s.Path)
}

// Snapshot fetches a snapshot from the process, as inspect.Take takes it. While the process
// sleeps it returns cuda.ErrSuspended.
func (s Socket) Snapshot(ctx context.Context) (inspect.Snapshot, error) {
	return s.snapshot(ctx, "snapshot", inspect.Read)
}

// Summary fetches a snapshot as inspect.Summarize takes it.
func (s Socket) Summary(ctx context.Context) (inspect.Snapshot, error) {
	return s.snapshot(ctx, "summary", inspect.ReadSummary)
}

func (s Socket) snapshot(ctx context.Context, name string, read func(io.Reader) (inspect.Snapshot, error)) (inspect.Snapshot, error) {
	body, err := s.Get(ctx, name)
	if err != nil {
		return inspect.Snapshot{}, err
	}
	defer func() { _ = body.Close() }() // what follows is not wanted
	return read(body)
}

// Get fetches a path of Handler. The caller closes the body.
func (s Socket) Get(ctx context.Context, name string) (body io.ReadCloser, err error) {
	return s.ask(ctx, "serve.Socket.Get", http.MethodGet, name)
}

// ask makes a request. The caller closes the body.
func (s Socket) ask(ctx context.Context, op, method, name string) (body io.ReadCloser, err error) {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return s.dial(ctx) }}
	request, err := http.NewRequestWithContext(ctx, method, "http://process/"+name, http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return nil, fmt.Errorf("%s: process %d: %w", op, s.PID, err)
	}
	if response.StatusCode == http.StatusOK {
		return response.Body, nil
	}
	why, _ := io.ReadAll(io.LimitReader(response.Body, 1000)) // as far as it goes
	_ = response.Body.Close()
	text := strings.TrimSpace(string(why))
	switch {
	case response.StatusCode == http.StatusServiceUnavailable:
		return nil, errs.New(errs.Failure{Op: op, Kind: errs.Suspended, Asked: fmt.Sprintf("process %d has been %s", s.PID, text), Hint: fmt.Sprintf("wake it with cuvmm wake %d", s.PID)})
	case response.StatusCode == http.StatusNotFound && method == http.MethodPost:
		return nil, errs.New(errs.Failure{Op: op, Kind: errs.NotSupported, Asked: fmt.Sprintf("process %d has not called serve.OfferSleep", s.PID),
			Hint: "have it do that in place of serve.Offer"})
	}
	return nil, fmt.Errorf("%s: process %d: %s: %s", op, s.PID, response.Status, text)
}
