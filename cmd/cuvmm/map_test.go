package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/serve"
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// program makes this process one with a buffer, a pool and an alias that offers its map.
func program(t *testing.T) (sys *cuda.System, buffer *vmm.Buffer) {
	t.Helper()
	dir, err := os.MkdirTemp("", "map") //nolint:usetesting // which makes longer paths than a socket's may be
	require.NoError(t, err)
	t.Setenv("XDG_RUNTIME_DIR", dir)
	_, sys = sim.Open(t)
	o, err := serve.Offer(sys)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, o.Close())
		require.NoError(t, os.RemoveAll(dir))
	})
	d := sys.Devices()[0]
	closing := func(c interface{ Close() error }) { t.Cleanup(func() { require.NoError(t, c.Close()) }) }
	buffer, err = vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 1 << 30, Chunks: vmm.FixedChunks(2 << 20)})
	require.NoError(t, err)
	closing(buffer)
	_, err = buffer.Append(nil, make([]byte, 5<<20))
	require.NoError(t, err)
	stream, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	closing(stream)
	p, err := pool.New(d, pool.Options{})
	require.NoError(t, err)
	closing(p)
	b, err := p.Alloc(pool.Request{Bytes: 20 << 20, Stream: stream, Tag: pool.NewTag("activations")})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Free(b)) })
	space, err := vmm.Reserve(d, 8<<20, vmm.ReserveOptions{})
	require.NoError(t, err)
	closing(space)
	memory, err := vmm.Create(d, 2<<20, vmm.Properties{})
	require.NoError(t, err)
	closing(memory)
	for _, at := range []int{0, 6 << 20} {
		m, err := space.Map(at, memory)
		require.NoError(t, err)
		closing(m)
	}
	return sys, buffer
}

// cuvmm runs a command and returns its output.
func cuvmm(t *testing.T, code int, args ...string) (out, complaints string) {
	t.Helper()
	var o, c bytes.Buffer
	h := thisHost()
	h.env = none
	require.Equal(t, code, run(args, &o, &c, h), "%s%s", &o, &c)
	return o.String(), c.String()
}

func TestMapOfAProcess(t *testing.T) {
	_, buffer := program(t)
	out, _ := cuvmm(t, exitOK, "map")
	require.Regexp(t, `pool \d+ on device 0: 32 MiB mapped of`, out)
	for _, want := range []string{
		buffer.Ptr().String() + "  buffer: 6 MiB mapped of 1 GiB\n",
		"reservation: 4 MiB mapped of 8 MiB, 4 MiB aliased\n",
		"20 MiB in 1 blocks, 32 MiB reserved",
		"    20 MiB      1  activations\n",
		"█░", "░·", "█·", "·█",
	} {
		require.Contains(t, out, want)
	}
	require.Regexp(t, `pool \d+ on device 0: 32 MiB mapped of`, out)
	require.NotContains(t, out, "\x1b", "colors are for terminals")
	byPID, _ := cuvmm(t, exitOK, "map", "-width", "40", strconv.Itoa(os.Getpid()))
	require.Contains(t, byPID, "activations")

	out, _ = cuvmm(t, exitOK, "map", "-json")
	var s inspect.Snapshot
	require.NoError(t, json.Unmarshal([]byte(out), &s))
	require.Len(t, s.Buffers, 1)
}

func TestMapsThatAreSavedAndCompared(t *testing.T) {
	sys, buffer := program(t)
	before := filepath.Join(t.TempDir(), "before.json")
	out, _ := cuvmm(t, exitOK, "map", "-save", before)
	require.Empty(t, out)
	_, err := buffer.Append(nil, make([]byte, 4<<20))
	require.NoError(t, err)

	server := httptest.NewServer(serve.Handler(sys))
	defer server.Close()
	out, _ = cuvmm(t, exitOK, "map", before, server.URL)
	require.Contains(t, out, "physical memory: 40 MiB, then 44 MiB\n")
	require.Contains(t, out, "    +4 MiB     +0  ")
	out, _ = cuvmm(t, exitOK, "map", "-json", before, server.URL+"/")
	var changes []inspect.Use
	require.NoError(t, json.Unmarshal([]byte(out), &changes))
	require.Len(t, changes, 1)
	require.Equal(t, 4<<20, changes[0].Bytes)
	out, _ = cuvmm(t, exitOK, "map", before, before)
	require.Contains(t, out, "the uses of memory are the same")
	out, _ = cuvmm(t, exitOK, "map", server.URL, before)
	require.Contains(t, out, "the first snapshot is the later one")
	text, err := os.ReadFile(before)
	require.NoError(t, err)
	elsewhere := filepath.Join(t.TempDir(), "elsewhere.json")
	require.NoError(t, os.WriteFile(elsewhere, bytes.Replace(text, []byte(`"host":"`), []byte(`"host":"other-`), 1), 0o600))
	out, _ = cuvmm(t, exitOK, "map", elsewhere, before)
	require.Contains(t, out, "on other-")
	require.Contains(t, out, "these are different processes")
	require.NoError(t, os.WriteFile(elsewhere, text[:len(text)/2], 0o600))
	_, complaints := cuvmm(t, exitFailed, "map", elsewhere)
	require.Contains(t, complaints, elsewhere+" cannot be read as a snapshot that -save wrote: inspect: read a snapshot: it is cut short")
	_, complaints = cuvmm(t, exitFailed, "map", "-save", filepath.Join(elsewhere, "x"), before)
	require.Contains(t, complaints, "cannot be written, nor any file beside it: not a directory")

	page := filepath.Join(t.TempDir(), "map.html")
	_, _ = cuvmm(t, exitOK, "map", "-html", page, before, server.URL)
	text, err = os.ReadFile(page)
	require.NoError(t, err)
	require.Contains(t, string(text), "activations")
}

func TestMapErrors(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	bad := filepath.Join(t.TempDir(), "bad.json")
	require.NoError(t, os.WriteFile(bad, []byte("{}"), 0o600))
	server := httptest.NewServer(nil)
	defer server.Close()
	for _, c := range []struct{ name, want string }{
		{"", "no process of this user offers its map: name a file or a URL, or have the program call serve.Offer"},
		{"1", "process 1 offers no map to this user"},
		{"/nowhere.json", "no such file or directory: name the number of a process, a URL"},
		{"http://localhost:1/", "refused: name the URL at which a process has mounted serve.Handler"},
		{bad, "this program reads"},
		{server.URL, "404 Not Found: name the URL"},
	} {
		args := []string{"map"}
		if c.name != "" {
			args = append(args, c.name)
		}
		_, complaints := cuvmm(t, exitFailed, args...)
		require.Contains(t, complaints, c.want)
	}
	_, complaints := cuvmm(t, exitUsage, "map", "-http", "localhost:0", bad, bad)
	require.Contains(t, complaints, "-http follows one process")
	_, complaints = cuvmm(t, exitFailed, "map", "-http", "nonsense", bad)
	require.Contains(t, complaints, "-http nonsense: listen tcp: address nonsense: missing port in address: use a host and a free port")
	for _, c := range [][]string{{"-html", "a", "-save", "b"}, {"-json", "-http", ":0"}, {"-every", "-1s"}, {"-width", "-1"}, {"-rows", "0"}} {
		_, complaints := cuvmm(t, exitUsage, append([]string{"map"}, c...)...)
		require.Contains(t, complaints, c[0])
	}
}

func TestAFileThatCannotBeReplaced(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "full"), 0o700))
	err := toFile(filepath.Join(dir, "full"), func(io.Writer) error { return nil })
	require.ErrorContains(t, err, "full: is a directory")
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 1)
}

// What is no regular file stays what it is.
func TestWhatIsWrittenInPlace(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	text := func(w io.Writer) error { _, err := io.WriteString(w, "new"); return err }
	require.NoError(t, os.WriteFile(at("file"), []byte("an old and longer text"), 0o600))
	require.NoError(t, os.Symlink("file", at("link")))
	require.NoError(t, os.Symlink("made", at("dangling")))
	for link, target := range map[string]string{"link": "file", "dangling": "made"} {
		require.NoError(t, toFile(at(link), text))
		got, err := os.ReadFile(at(target))
		require.NoError(t, err)
		require.Equal(t, "new", string(got))
		about, err := os.Lstat(at(link))
		require.NoError(t, err)
		require.Equal(t, os.ModeSymlink, about.Mode().Type())
	}

	reader, writer, err := os.Pipe()
	require.NoError(t, err)
	defer reader.Close()
	pipe := fmt.Sprintf("/proc/self/fd/%d", writer.Fd())
	if _, err := os.Stat(pipe); err != nil {
		needs.Lacks(t, "/proc: %v", err)
	}
	require.NoError(t, toFile(pipe, text))
	require.NoError(t, writer.Close())
	got, err := io.ReadAll(reader)
	require.NoError(t, err)
	require.Equal(t, "new", string(got))
}

func TestAProcessThatDoesNotReply(t *testing.T) {
	asked := func(ctx context.Context) (inspect.Snapshot, error) {
		<-ctx.Done()
		return inspect.Snapshot{}, fmt.Errorf("read: %w", ctx.Err())
	}
	_, err := within("it", time.Millisecond, asked)(t.Context())
	require.EqualError(t, err, "it did not reply within 1ms; a stopped process (state T in ps) does not")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = within("it", time.Hour, asked)(ended)
	require.ErrorIs(t, err, context.Canceled)
}

func TestSizes(t *testing.T) {
	for bytes, want := range map[int]string{0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 2 << 20: "2 MiB", -3 << 30: "-3 GiB", 150<<20 + 5: "150 MiB"} {
		require.Equal(t, want, size(bytes))
	}
}
