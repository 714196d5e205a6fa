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
)

// Offered is a socket that serves snapshots of a System. The caller closes it.
type Offered struct {
	path   string
	server *http.Server
	done   chan struct{}
	once   sync.Once
	err    error
}

// serials number the sockets of this process.
var serials atomic.Int64

// Offer serves [Handler] on a new socket in [Folder], for programs of the same user such
// as cuvmm map and cuvmm top.
func Offer(sys *cuda.System) (*Offered, error) {
	const op = "serve.Offer"
	folder := Folder()
	if err := private(folder, true); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	path := filepath.Join(folder, fmt.Sprintf("%d-%d.sock", os.Getpid(), serials.Add(1)))
	// A process with this number that died may have left its socket.
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	o := &Offered{path: path, done: make(chan struct{}),
		server: &http.Server{Handler: Handler(sys), ReadHeaderTimeout: time.Minute}}
	go func() {
		defer close(o.done)
		_ = o.server.Serve(l) // until Close, which removes the socket
	}()
	return o, nil
}

// Path returns the path of the socket.
func (o *Offered) Path() string { return o.path }

// Close ends requests in flight and removes the socket. Idempotent.
func (o *Offered) Close() error {
	o.once.Do(func() {
		o.err = o.server.Close()
		<-o.done
	})
	return o.err
}

// Folder returns the folder of the sockets: cuvmm in XDG_RUNTIME_DIR, or if that is
// no absolute path in /run/user/UID, or if there is none cuvmm-UID in the folder for
// temporary files. [Offer] and [Find] refuse a folder that belongs to another user, or
// that other users may enter.
func Folder() string {
	if dir := environ.Get("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "cuvmm")
	}
	user := strconv.Itoa(os.Getuid())
	if dir := filepath.Join("/run/user", user); private(dir, false) == nil {
		return filepath.Join(dir, "cuvmm")
	}
	return filepath.Join(os.TempDir(), "cuvmm-"+user)
}

const remedy = "set XDG_RUNTIME_DIR to a folder of this user that can be written to"

// private returns an error unless the folder is this user's alone.
func private(folder string, create bool) error {
	if create {
		if err := os.Mkdir(folder, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("%w: "+remedy, err)
		}
	}
	about, err := os.Lstat(folder)
	switch {
	case err != nil:
		return err
	case !about.IsDir():
		return fmt.Errorf("%s is not a folder: "+remedy, folder)
	case about.Mode().Perm()&0o077 != 0:
		return fmt.Errorf("%s has mode %#o, so other users may enter it: make it 0700, or "+remedy, folder, about.Mode().Perm())
	}
	return owned(folder, about)
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
	entries, err := os.ReadDir(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("serve.Find: %w: "+remedy, err)
	}
	if err := private(folder, false); err != nil {
		return nil, fmt.Errorf("serve.Find: %w", err)
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
		switch {
		case err == nil:
			_ = conn.Close() // the process lives
			all = append(all, s)
		case refused(err):
			_ = os.Remove(s.Path) // another process may have removed it
		}
	}
	return all, ctx.Err()
}

func (s Socket) dial(ctx context.Context) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "unix", s.Path)
}

// Snapshot fetches a snapshot from the process, as inspect.Take takes it.
func (s Socket) Snapshot(ctx context.Context) (inspect.Snapshot, error) {
	return s.snapshot(ctx, "snapshot")
}

// Summary fetches a snapshot as inspect.Summarize takes it.
func (s Socket) Summary(ctx context.Context) (inspect.Snapshot, error) {
	return s.snapshot(ctx, "summary")
}

func (s Socket) snapshot(ctx context.Context, name string) (inspect.Snapshot, error) {
	body, err := s.Get(ctx, name)
	if err != nil {
		return inspect.Snapshot{}, err
	}
	defer func() { _ = body.Close() }() // all of it has been read
	return inspect.Read(body)
}

// Get fetches a path of Handler. The caller closes the body.
func (s Socket) Get(ctx context.Context, name string) (body io.ReadCloser, err error) {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return s.dial(ctx) }}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://process/"+name, http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("serve.Socket.Get: %w", err)
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return nil, fmt.Errorf("serve.Socket.Get: process %d: %w", s.PID, err)
	}
	if response.StatusCode != http.StatusOK {
		why, _ := io.ReadAll(io.LimitReader(response.Body, 1000)) // as far as it goes
		_ = response.Body.Close()
		return nil, fmt.Errorf("serve.Socket.Get: process %d: %s: %s", s.PID, response.Status, strings.TrimSpace(string(why)))
	}
	return response.Body, nil
}
