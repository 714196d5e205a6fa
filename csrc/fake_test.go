//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"unsafe"

	"github.com/cuvmm/cuvmm/csrc"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
)

// fake is a library that stands in for libcuda.so.1, built from
// testdata/fakecuda. The record of its calls and the results that it is to give
// lie in a file that it shares with the test.
type fake struct {
	path  string
	state *fakeState
}

// The structs of fakecuda.h.
type fakeState struct {
	Quiet   uint32
	Count   uint32
	Results [16]fakeResult
	Calls   [4096]fakeCall
}

type fakeResult struct {
	Entry  [48]byte
	Result int32
	Skip   uint32
}

type fakeCall struct {
	Entry   [48]byte
	Context uint64
	Thread  int32
	Mode    uint32
	Result  int32
	N       uint32
	Args    [256]byte
}

// recorded is a call as the tests compare it.
type recorded struct {
	Entry   string
	Context driver.Context
	Thread  int
	Mode    driver.CaptureMode
	Args    []byte
}

var built struct {
	sync.Mutex
	variants map[string][]byte
}

// compileFake returns a variant of the library, compiled once.
func compileFake(tb testing.TB, defines []string) []byte {
	tb.Helper()
	cc := needs.Program(tb, "cc")
	built.Lock()
	defer built.Unlock()
	key := strings.Join(defines, "\x00")
	if lib := built.variants[key]; lib != nil {
		return lib
	}
	path := filepath.Join(tb.TempDir(), "libcuda.so.1")
	args := []string{"-shared", "-fPIC", "-O2", "-o", path}
	for _, d := range defines {
		args = append(args, "-D"+d)
	}
	out, err := exec.CommandContext(tb.Context(), cc, append(args, "testdata/fakecuda/fakecuda.c", "-ldl")...).CombinedOutput()
	require.NoError(tb, err, "%s", out)
	lib, err := os.ReadFile(path)
	require.NoError(tb, err)
	if built.variants == nil {
		built.variants = map[string][]byte{}
	}
	built.variants[key] = lib
	return lib
}

// buildFake puts a variant of the library into a folder of its own, so that it
// is loaded on its own.
func buildFake(tb testing.TB, defines ...string) *fake {
	tb.Helper()
	f := &fake{path: filepath.Join(tb.TempDir(), "libcuda.so.1")}
	require.NoError(tb, os.WriteFile(f.path, compileFake(tb, defines), 0o600))

	file, err := os.OpenFile(f.path+".state", os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(tb, err)
	defer file.Close()
	size := int(unsafe.Sizeof(fakeState{}))
	require.NoError(tb, file.Truncate(int64(size)))
	// Mapped for the life of the process, as the library is.
	mem, err := syscall.Mmap(int(file.Fd()), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	require.NoError(tb, err)
	f.state = (*fakeState)(unsafe.Pointer(unsafe.SliceData(mem)))
	return f
}

// open opens the library and forgets the calls that this made.
func (f *fake) open(tb testing.TB) driver.Driver {
	tb.Helper()
	d, err := open(csrc.Options{Path: f.path, Multicast: true})
	require.NoError(tb, err)
	f.calls(tb)
	return d
}

// returns makes an entry point return a result, after as many successes; without
// an entry point all give success again.
func (f *fake) returns(entry string, r driver.Result, successes ...uint32) {
	f.state.Results = [16]fakeResult{}
	if entry != "" {
		f.also(entry, r, successes...)
	}
}

// also adds to what returns set.
func (f *fake) also(entry string, r driver.Result, successes ...uint32) {
	i := 0
	for f.state.Results[i].Entry[0] != 0 {
		i++
	}
	res := fakeResult{Result: int32(r)}
	if len(successes) > 0 {
		res.Skip = successes[0]
	}
	copy(res.Entry[:], entry)
	f.state.Results[i] = res
}

func (f *fake) quiet(q bool) {
	v := uint32(0)
	if q {
		v = 1
	}
	atomic.StoreUint32(&f.state.Quiet, v)
}

// calls returns the calls since the last time.
func (f *fake) calls(tb testing.TB) []recorded {
	tb.Helper()
	n := atomic.SwapUint32(&f.state.Count, 0)
	require.LessOrEqual(tb, int(n), len(f.state.Calls), "more calls than the record holds")
	var all []recorded
	for i := range f.state.Calls[:n] {
		c := &f.state.Calls[i]
		entry, _, _ := bytes.Cut(c.Entry[:], []byte{0})
		all = append(all, recorded{
			Entry: string(entry), Context: driver.Context(c.Context), Thread: int(c.Thread),
			Mode: driver.CaptureMode(c.Mode), Args: bytes.Clone(c.Args[:c.N]),
		})
	}
	return all
}

func entries(calls []recorded) []string {
	var names []string
	for _, c := range calls {
		names = append(names, c.Entry)
	}
	return names
}
