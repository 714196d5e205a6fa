//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
)

const (
	// openFirst opens the first of the places named, in a process whose loader
	// searches where its test says.
	openFirst = "open the first"
	// openUnprivileged opens a path as a user without rights.
	openUnprivileged = "open unprivileged"
)

// opened is what they report.
type opened struct {
	Path   string
	Reason csrc.Reason
	Error  string
}

func init() {
	reexec.Register(openFirst, func(c *reexec.Child) error {
		return c.Send(answerOf(inside(csrc.OpenFirst(c.Args))))
	})
	reexec.Register(openUnprivileged, func(c *reexec.Child) error {
		if os.Geteuid() == 0 {
			if err := syscall.Setuid(65534); err != nil {
				return err
			}
		}
		return c.Send(answerOf(open(csrc.Options{Path: c.Args[0]})))
	})
}

func answerOf(d driver.Driver, err error) opened {
	if err == nil {
		return opened{Path: d.Describe().Path}
	}
	var e *csrc.OpenError
	errors.As(err, &e)
	return opened{Reason: e.Reason, Error: err.Error()}
}

func openInChild(t *testing.T, searched string, places ...string) (o opened) {
	t.Helper()
	child := reexec.Command(t, openFirst, places...)
	child.Env = append(os.Environ(), "LD_LIBRARY_PATH="+searched)
	child.Start()
	child.Recv(&o)
	child.Wait()
	return o
}

func reasonOf(t *testing.T, err error) *csrc.OpenError {
	t.Helper()
	var e *csrc.OpenError
	require.ErrorAs(t, err, &e)
	return e
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		p := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(p, []byte(text), mode))
		return p
	}
	dangling := filepath.Join(dir, "dangling")
	require.NoError(t, os.Symlink(filepath.Join(dir, "nowhere"), dangling))
	fakeOf := func(defines ...string) func() string {
		return func() string { return buildFake(t, defines...).path }
	}
	is := func(p string) func() string { return func() string { return p } }
	mute := func() string {
		f := buildFake(t)
		f.returns("cuDriverGetVersion", driver.Unknown)
		return f.path
	}
	pipe := filepath.Join(dir, "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	for _, c := range []struct {
		name   string
		path   func() string
		reason csrc.Reason
		says   []string
	}{
		{"a path to nothing", is(filepath.Join(dir, "none.so")), csrc.NotLoaded, []string{"none.so: no such file", "a wrong path"}},
		{"a path through a file", is(file("plain", "x", 0o600) + "/lib.so"), csrc.NotLoaded, []string{"no such file"}},
		{"a bare name that the loader does not know", is("libcuvmm-none.so.9"), csrc.NotLoaded, []string{"libcuvmm-none.so.9: not in the loader's path"}},
		{"a link to nothing", is(dangling), csrc.NotLoaded, []string{"dangling", "No such file"}},
		{"a folder", is(dir), csrc.NotLoaded, []string{dir, "no regular file"}},
		{"a named pipe", is(pipe), csrc.NotLoaded, []string{"no regular file but p"}},
		{"a device", is(os.DevNull), csrc.NotLoaded, []string{"no regular file but Dc"}},
		{"an empty file, as images keep of a mount", is(file("empty.so", "", 0o600)), csrc.NotLoaded, []string{"file too short"}},
		{"a file that is no library", is(file("text.so", "these are only words", 0o600)), csrc.NotLoaded, []string{"file too short"}},
		{"a path with a NUL", is("libcuda\x00.so"), csrc.NotLoaded, []string{"NUL"}},
		{"a library that is no driver", fakeOf("FAKECUDA_NOT_CUDA"), csrc.NotCUDA, []string{"no cuInit", "libcuda.so.1"}},
		{"a driver that hides what nothing works without", fakeOf(`FAKECUDA_MISSING="cuCtxSetCurrent"`), csrc.NotCUDA, []string{"cuCtxSetCurrent"}},
		{"a driver of an unknown version", mute, csrc.NotCUDA, []string{"cuDriverGetVersion returns", "UNKNOWN (999)"}},
		{"the toolkit's stub", fakeOf("FAKECUDA_STUB"), csrc.Stub, []string{"STUB_LIBRARY (34)", "LD_LIBRARY_PATH"}},
		{"the stub of an older toolkit", fakeOf("FAKECUDA_STUB", "FAKECUDA_NO_PROC"), csrc.Stub, []string{"STUB_LIBRARY (34)"}},
		{"a driver before cuGetProcAddress", fakeOf("FAKECUDA_NO_PROC", "FAKECUDA_VERSION=11020"), csrc.TooOld, []string{"it is CUDA 11.2", "needs CUDA 11.3", "update"}},
		{"a driver that says it is older", fakeOf("FAKECUDA_VERSION=10020"), csrc.TooOld, []string{"it is CUDA 10.2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := c.path()
			d, err := open(csrc.Options{Path: path})
			require.Nil(t, d)
			e := reasonOf(t, err)
			require.Equal(t, c.reason, e.Reason, "%v", err)
			require.Len(t, e.Attempts, 1)
			require.Equal(t, path, e.Attempts[0].Path)
			for _, s := range append(c.says, e.Reason.Remedy(), path) {
				require.ErrorContains(t, err, s)
			}
			require.NotEmpty(t, e.Reason.Remedy())
			maps, err := os.ReadFile("/proc/self/maps")
			require.NoError(t, err)
			require.NotContains(t, string(maps), path+"\n", "a refused library stays loaded, for others to find by its name")
		})
	}
}

// A library that is cut short is refused, and never given to the loader, which
// would map it and crash.
func TestOpenOfALibraryThatIsCutShort(t *testing.T) {
	whole, err := os.ReadFile(buildFake(t).path)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "cut.so")
	for part := 1; part < 16; part++ {
		n := len(whole) * part / 16
		require.NoError(t, os.WriteFile(path, whole[:n], 0o600))
		_, err := open(csrc.Options{Path: path})
		require.Equal(t, csrc.NotLoaded, reasonOf(t, err).Reason, "%d of %d bytes", n, len(whole))
		if part == 8 {
			require.ErrorContains(t, err, fmt.Sprintf("the file is cut short: it has %d bytes", n))
		}
	}
}

// The file mode does not bind root, so the child gives up its rights first.
func TestOpenUnreadable(t *testing.T) {
	f := buildFake(t)
	require.NoError(t, os.Chmod(f.path, 0))
	child := reexec.Command(t, openUnprivileged, f.path)
	child.Start()
	var o opened
	child.Recv(&o)
	child.Wait()
	require.Equal(t, csrc.NotLoaded, o.Reason, o.Error)
	require.Contains(t, o.Error, f.path+": cannot open shared object file: Permission denied")
}

func TestOpenSearches(t *testing.T) {
	usable, stub, nothing := buildFake(t), buildFake(t, "FAKECUDA_STUB"), filepath.Join(t.TempDir(), "libcuda.so.1")
	older := buildFake(t, "FAKECUDA_NO_PROC", "FAKECUDA_VERSION=11000")
	const absent = "libcuvmm-none.so.9"

	d, err := inside(csrc.OpenFirst([]string{absent, nothing, stub.path, usable.path}))
	require.NoError(t, err, "the first that is a usable driver is taken")
	require.Equal(t, driver.Description{Path: usable.path}, d.Describe())

	_, err = inside(csrc.OpenFirst([]string{absent, nothing}))
	e := reasonOf(t, err)
	require.Equal(t, csrc.NotFound, e.Reason)
	require.Equal(t, []csrc.Attempt{
		{Path: absent, Reason: csrc.NotFound, Detail: "not in the loader's path"},
		{Path: nothing, Reason: csrc.NotFound, Detail: "no such file"},
	}, e.Attempts)
	require.EqualError(t, err, "no CUDA driver is installed: "+csrc.NotFound.Remedy()+
		" (nothing at "+absent+", "+nothing+")")

	_, err = inside(csrc.OpenFirst([]string{nothing, older.path, stub.path}))
	e = reasonOf(t, err)
	require.Equal(t, csrc.TooOld, e.Reason, "of the first that was found")
	require.Len(t, e.Attempts, 3)
}

// The loader's own search, in a process that starts with its folders.
func TestOpenByTheLoader(t *testing.T) {
	f := buildFake(t)
	require.Equal(t, opened{Path: f.path}, openInChild(t, filepath.Dir(f.path), "libcuda.so.1"))

	empty := t.TempDir()
	o := openInChild(t, empty, "libcuvmm-none.so.9")
	require.Equal(t, csrc.NotFound, o.Reason, o.Error)

	// A library that is there and needs another that is not is no absent one.
	needy := buildFake(t)
	dir := filepath.Dir(needy.path)
	cc := func(args ...string) {
		cmd := exec.CommandContext(t.Context(), "cc", args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "gone.c"), []byte("int gone(void) { return 0; }\n"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "needy.c"), []byte("int gone(void);\nint cuInit(unsigned f) { return gone() + (int)f; }\n"), 0o600))
	cc("-shared", "-fPIC", "-Wl,-soname,libgone.so", "-o", "libgone.so", "gone.c")
	cc("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "needy.c", "-L.", "-lgone")
	require.NoError(t, os.Remove(filepath.Join(dir, "libgone.so")))
	o = openInChild(t, dir, "libcuda.so.1")
	require.Equal(t, csrc.NotLoaded, o.Reason, o.Error)
	require.Contains(t, o.Error, "libgone.so")

	stub := buildFake(t, "FAKECUDA_STUB")
	require.Equal(t, opened{Path: f.path}, openInChild(t, filepath.Dir(stub.path), "libcuda.so.1", f.path))
}

// A fake that is loaded by its path must not be what the search for the real
// driver finds: it has no soname for that.
func TestFakesAreNotFoundByName(t *testing.T) {
	f := buildFake(t)
	f.open(t)
	if d, err := open(csrc.Options{}); err == nil {
		require.NotEqual(t, f.path, d.Describe().Path)
	}
}

func TestDescribeNamesTheFileInFull(t *testing.T) {
	f := buildFake(t)
	t.Chdir(filepath.Dir(f.path))
	d, err := open(csrc.Options{Path: "./libcuda.so.1"})
	require.NoError(t, err)
	require.Equal(t, driver.Description{Path: f.path}, d.Describe())
}

func TestOpenAgainIsTheSame(t *testing.T) {
	f, other := buildFake(t), buildFake(t)
	link := filepath.Join(t.TempDir(), "link.so")
	require.NoError(t, os.Symlink(f.path, link))
	first := f.open(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for _, path := range []string{f.path, link} {
				if again, err := open(csrc.Options{Path: path}); err != nil || again != first {
					t.Errorf("opened again by %s: %p and %v, want %p", path, again, err, first)
				}
			}
		})
	}
	wg.Wait()
	require.Empty(t, f.calls(t), "its entry points are taken once")
	require.NotSame(t, first, other.open(t))

	foreign := first.Foreign()
	require.Same(t, foreign, first.Foreign())
	require.Same(t, foreign, foreign.Foreign())
	require.Equal(t, first.Describe(), first.Foreign().Describe())
}
