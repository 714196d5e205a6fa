package serve_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/serve"
	_ "github.com/cuvmm/cuvmm/internal/test/gputest" // with it, another library captures beside each test
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestHandlerMountedAnywhere(t *testing.T) {
	_, sys := sim.Open(t)
	r, err := vmm.Reserve(sys.Devices()[0], 2<<20, vmm.ReserveOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Close()) }()
	for _, prefix := range []string{"/", "/debug/cuvmm/"} {
		mux := http.NewServeMux()
		mux.Handle(prefix, serve.Handler(sys))
		get := func(method, name string) *httptest.ResponseRecorder {
			w := httptest.NewRecorder()
			mux.ServeHTTP(w, httptest.NewRequest(method, prefix+name, http.NoBody))
			return w
		}
		w := get(http.MethodGet, "")
		require.Equal(t, http.StatusOK, w.Code)
		require.Equal(t, "text/html; charset=utf-8", w.Header().Get("Content-Type"))
		require.Contains(t, w.Body.String(), `{"source":"snapshot"}`)

		w = get(http.MethodGet, "snapshot")
		require.Equal(t, "application/json", w.Header().Get("Content-Type"))
		var s inspect.Snapshot
		require.NoError(t, json.NewDecoder(w.Body).Decode(&s))
		require.Equal(t, inspect.Address(r.Ptr()), s.Reservations[0].Ptr)

		require.Equal(t, "\x1f\x8b", get(http.MethodGet, "profile").Body.String()[:2])
		require.Equal(t, "\x80\x04", get(http.MethodGet, "torch").Body.String()[:2])
		require.Equal(t, http.StatusNotFound, get(http.MethodGet, "secrets").Code)
		require.Equal(t, http.StatusMethodNotAllowed, get(http.MethodPost, "snapshot").Code)
	}
}

func TestHandlerOfNothing(t *testing.T) {
	w := httptest.NewRecorder()
	serve.Handler(nil).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/snapshot", http.NoBody))
	require.Equal(t, http.StatusInternalServerError, w.Code)
	require.Contains(t, w.Body.String(), "a nil System")
}

// runtime is a folder for the sockets of a test. A socket's path is short.
func runtime(t *testing.T) string {
	dir, err := os.MkdirTemp("", "serve") //nolint:usetesting // which makes longer paths than a socket's may be
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	t.Setenv("XDG_RUNTIME_DIR", dir)
	return dir
}

func TestOfferAndFind(t *testing.T) {
	dir := runtime(t)
	_, sys := sim.Open(t)
	none, err := serve.Find(t.Context())
	require.NoError(t, err)
	require.Empty(t, none)

	o, err := serve.Offer(sys)
	require.NoError(t, err)
	second, err := serve.Offer(sys)
	require.NoError(t, err)
	require.NotEqual(t, o.Path(), second.Path())
	about, err := os.Stat(filepath.Join(dir, "cuvmm"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), about.Mode().Perm())

	found, err := serve.Find(t.Context())
	require.NoError(t, err)
	require.Len(t, found, 2)
	require.Equal(t, serve.Socket{PID: os.Getpid(), Path: o.Path()}, found[0])
	s, err := found[0].Snapshot(t.Context())
	require.NoError(t, err)
	require.Equal(t, os.Getpid(), s.Process.PID)
	s, err = found[0].Summary(t.Context())
	require.NoError(t, err)
	require.Empty(t, s.Others)
	_, err = found[0].Get(t.Context(), "secrets")
	require.ErrorContains(t, err, "404")

	require.NoError(t, o.Close())
	require.NoError(t, o.Close())
	require.NoFileExists(t, o.Path())
	require.NoError(t, second.Close())
	_, err = found[0].Snapshot(t.Context())
	require.Error(t, err)
}

// Find removes sockets of dead processes, and no other files.
func TestFindRemovesWhatDeadProcessesLeft(t *testing.T) {
	dir := runtime(t)
	_, sys := sim.Open(t)
	o, err := serve.Offer(sys)
	require.NoError(t, err)
	stale := filepath.Join(dir, "cuvmm", "1-1.sock")
	require.NoError(t, os.Link(o.Path(), stale))
	require.NoError(t, o.Close())
	require.NoError(t, os.WriteFile(filepath.Join(dir, "cuvmm", "note"), nil, 0o600))
	found, err := serve.Find(t.Context())
	require.NoError(t, err)
	require.Empty(t, found)
	require.NoFileExists(t, stale)
	require.FileExists(t, filepath.Join(dir, "cuvmm", "note"))
}

// Find removes no socket that a process has bound and does not listen on yet.
func TestFindBesideOffer(t *testing.T) {
	runtime(t)
	_, sys := sim.Open(t)
	o, err := serve.Offer(sys) // which makes the folder
	require.NoError(t, err)
	require.NoError(t, o.Close())
	ctx, cancel := context.WithCancel(t.Context())
	var finding sync.WaitGroup
	defer finding.Wait()
	defer cancel()
	for range 4 {
		finding.Go(func() {
			for ctx.Err() == nil {
				_, _ = serve.Find(ctx)
			}
		})
	}
	for range 500 {
		o, err := serve.Offer(sys)
		require.NoError(t, err)
		require.FileExists(t, o.Path())
		require.NoError(t, o.Close())
		require.NoFileExists(t, o.Path())
	}
}

// A process in another PID namespace may have this process's number: Offer takes none of
// its sockets, and Close removes none.
func TestSocketsOfAProcessWithTheSameNumber(t *testing.T) {
	dir := runtime(t)
	_, sys := sim.Open(t)
	first, err := serve.Offer(sys)
	require.NoError(t, err)
	var serial int
	_, err = fmt.Sscanf(filepath.Base(first.Path()), strconv.Itoa(os.Getpid())+"-%d.sock", &serial)
	require.NoError(t, err)
	listen := func(path string) {
		l, err := net.Listen("unix", path)
		require.NoError(t, err)
		l.(*net.UnixListener).SetUnlinkOnClose(false)
		t.Cleanup(func() { _ = l.Close() })
	}
	next := func() string {
		serial++
		return filepath.Join(dir, "cuvmm", fmt.Sprintf("%d-%d.sock", os.Getpid(), serial))
	}
	listen(next())
	require.NoError(t, os.WriteFile(next(), nil, 0o600))
	second, err := serve.Offer(sys)
	require.NoError(t, err)
	require.Equal(t, next(), second.Path())

	require.NoError(t, os.Remove(first.Path()))
	listen(first.Path())
	require.NoError(t, first.Close())
	require.NoError(t, second.Close())
	left, err := filepath.Glob(filepath.Join(dir, "cuvmm", "*"))
	require.NoError(t, err)
	require.Len(t, left, 3)
	found, err := serve.Find(t.Context())
	require.NoError(t, err)
	require.Len(t, found, 2)
}

func TestOfferRefusesAFolderOfOthers(t *testing.T) {
	_, sys := sim.Open(t)
	dir := runtime(t)
	folder := filepath.Join(dir, "cuvmm")
	require.NoError(t, os.Mkdir(folder, 0o700))
	require.NoError(t, os.Chmod(folder, 0o755))
	_, err := serve.Offer(sys)
	require.ErrorContains(t, err, "has mode 0755, so other users may enter it")
	_, err = serve.Find(t.Context())
	require.ErrorContains(t, err, "0755")

	require.NoError(t, os.Remove(folder))
	require.NoError(t, os.Symlink(t.TempDir(), folder))
	_, err = serve.Offer(sys)
	require.ErrorContains(t, err, "is not a folder")
	require.True(t, strings.HasPrefix(serve.Folder(), dir))
}
