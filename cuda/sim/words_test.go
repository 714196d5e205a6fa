//go:build linux && (amd64 || arm64)

package sim

import (
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

const wordsPage = 4096

// sharedWords maps a memory file, and makes it known to the device.
func sharedWords(d driver.Driver, ctx driver.Context, f *os.File) ([]byte, driver.Ptr, error) {
	page, err := unix.Mmap(int(f.Fd()), 0, wordsPage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, 0, err
	}
	if r := d.MemHostRegister(ctx, pointer(page), wordsPage, driver.HostRegisterDeviceMap); r != driver.Success {
		return nil, 0, fmt.Errorf("register: %v", r)
	}
	p, r := d.MemHostGetDevicePointer(ctx, pointer(page))
	if r != driver.Success {
		return nil, 0, fmt.Errorf("device pointer: %v", r)
	}
	return page, p, nil
}

// errand of a child: its stream writes Value to the word of that index,
// once the word of index After, if there is one, is 1.
type errand struct {
	Word, After int
	Value       uint64
}

func init() {
	reexec.Register("sim: writer of words", func(c *reexec.Child) error {
		_, d, err := opened()
		if err != nil {
			return err
		}
		ctx, _ := d.DevicePrimaryCtxRetain(0)
		_, p, err := sharedWords(d, ctx, c.Files[0])
		if err != nil {
			return err
		}
		s, _ := d.StreamCreate(ctx, driver.StreamNonBlocking)
		for {
			var o errand
			if err := c.Recv(&o); err != nil {
				return nil
			}
			if o.After > 0 {
				d.StreamWaitValue64(ctx, s, p+driver.Ptr(8*o.After), 1)
			}
			if r := d.StreamWriteValue64(ctx, s, p+driver.Ptr(8*o.Word), o.Value); r != driver.Success {
				return fmt.Errorf("write: %v", r)
			}
			if err := c.Send(true); err != nil {
				return err
			}
		}
	})
}

// shared is a page of words that the rig shares with a child.
func (r *rig) sharedWith(child string) (words []byte, p driver.Ptr, c *reexec.Cmd) {
	r.t.Helper()
	fd, err := unix.MemfdCreate("words", unix.MFD_CLOEXEC)
	require.NoError(r.t, err)
	f := os.NewFile(uintptr(fd), "words")
	r.t.Cleanup(func() { f.Close() })
	require.NoError(r.t, f.Truncate(wordsPage))
	words, p, err = sharedWords(r.lib, r.ctx, f)
	require.NoError(r.t, err)
	r.t.Cleanup(func() {
		r.ok(r.MemHostUnregister(r.ctx, pointer(words)))
		require.NoError(r.t, unix.Munmap(words))
	})
	c = reexec.Command(r.t, child)
	c.ExtraFiles = []*os.File{f}
	c.Start()
	return words, p, c
}

func (r *rig) errand(c *reexec.Cmd, e errand) {
	r.t.Helper()
	c.Send(e)
	var submitted bool
	c.Recv(&submitted)
}

func wordAt(page []byte, i int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&page[8*i]))
}

func TestAnotherProcessesStreamReleasesWaits(t *testing.T) {
	r := start(t, Options{})
	_, p, c := r.sharedWith("sim: writer of words")
	marks := r.mapped(1)
	var streams []driver.Stream
	for i := range 8 {
		s := r.stream(driver.StreamNonBlocking)
		r.ok(r.StreamWaitValue64(r.ctx, s, p+driver.Ptr(8*i), 3))
		r.ok(r.MemsetD8Async(r.ctx, marks+driver.Ptr(i), byte(i+1), 1, s))
		streams = append(streams, s)
	}
	for i := 7; i >= 0; i-- {
		r.errand(c, errand{Word: i, Value: 2})
		time.Sleep(laziness)
		r.is(driver.NotReady, r.StreamQuery(r.ctx, streams[i]))
		require.Zero(t, r.bytes(marks+driver.Ptr(i), 1)[0])
		r.errand(c, errand{Word: i, Value: 3})
		r.ok(r.StreamSynchronize(r.ctx, streams[i]))
		require.EqualValues(t, i+1, r.bytes(marks+driver.Ptr(i), 1)[0])
	}
	// Nothing is looked at when no stream waits.
	require.Eventually(t, func() bool {
		r.m.mu.Lock()
		defer r.m.mu.Unlock()
		return !r.m.engine.running
	}, time.Minute, time.Millisecond)
}

func TestWaitsGoBackAndForthBetweenProcesses(t *testing.T) {
	r := start(t, Options{})
	words, p, c := r.sharedWith("sim: writer of words")
	s := r.stream(driver.StreamNonBlocking)
	// The child's stream waits for word 1, which this one writes, and then
	// writes word 2, for which this one waits.
	r.errand(c, errand{Word: 2, After: 1, Value: 9})
	r.ok(r.StreamWaitValue64(r.ctx, s, p+16, 9))
	r.ok(r.StreamWriteValue64(r.ctx, s, p+24, 1))
	require.Zero(t, wordAt(words, 3).Load())
	other := r.stream(driver.StreamNonBlocking)
	r.ok(r.StreamWriteValue64(r.ctx, other, p+8, 1))
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.EqualValues(t, 1, wordAt(words, 3).Load())
}

func TestAWriterIsKilledWhileOthersWait(t *testing.T) {
	r := start(t, Options{})
	words, p, c := r.sharedWith("sim: writer of words")
	s := r.stream(driver.StreamNonBlocking)
	r.ok(r.StreamWaitValue64(r.ctx, s, p, 1))
	r.errand(c, errand{Word: 0, After: 1, Value: 1}) // its stream waits, too
	c.Kill()
	wordAt(words, 1).Store(1) // too late for it
	time.Sleep(5 * laziness)
	r.is(driver.NotReady, r.StreamQuery(r.ctx, s))
	wordAt(words, 0).Store(1)
	r.ok(r.StreamSynchronize(r.ctx, s))
}

func TestAHeldStreamIgnoresAnotherProcessesWrite(t *testing.T) {
	r := start(t, Options{})
	words, p, c := r.sharedWith("sim: writer of words")
	s := r.stream(driver.StreamNonBlocking)
	release := r.m.Hold(uintptr(s))
	defer release()
	r.ok(r.StreamWaitValue64(r.ctx, s, p, 1))
	r.ok(r.StreamWriteValue64(r.ctx, s, p+8, 7))
	r.errand(c, errand{Word: 0, Value: 1})
	require.Eventually(t, func() bool { return wordAt(words, 0).Load() == 1 }, time.Minute, time.Millisecond)
	time.Sleep(5 * laziness)
	r.is(driver.NotReady, r.StreamQuery(r.ctx, s))
	require.Zero(t, wordAt(words, 1).Load())
	release()
	r.ok(r.StreamSynchronize(r.ctx, s))
	require.EqualValues(t, 7, wordAt(words, 1).Load())
}

func TestACapturedWaitIsReplayedAcrossProcesses(t *testing.T) {
	r := start(t, Options{})
	words, p, c := r.sharedWith("sim: writer of words")
	s := r.stream(driver.StreamNonBlocking)
	r.ok(r.StreamBeginCapture(r.ctx, s, driver.CaptureRelaxed))
	r.ok(r.StreamWaitValue64(r.ctx, s, p, 1))
	r.ok(r.StreamWriteValue64(r.ctx, s, p+8, 7))
	g, res := r.StreamEndCapture(r.ctx, s)
	r.ok(res)
	exec, res := r.GraphInstantiate(r.ctx, g)
	r.ok(res)
	r.ok(r.GraphDestroy(g))
	for range 3 {
		wordAt(words, 0).Store(0)
		wordAt(words, 1).Store(0)
		r.ok(r.GraphLaunch(r.ctx, exec, s))
		time.Sleep(2 * laziness)
		require.Zero(t, wordAt(words, 1).Load())
		r.errand(c, errand{Word: 0, Value: 1})
		r.ok(r.StreamSynchronize(r.ctx, s))
		require.EqualValues(t, 7, wordAt(words, 1).Load())
	}
	r.ok(r.GraphExecDestroy(exec))
}

// A word may lie in memory that two processes share.
func TestAWordInSharedDeviceMemoryReleasesAWait(t *testing.T) {
	folder := t.TempDir()
	a, b := start(t, small(folder, 8)), start(t, small(folder, 8))
	h := a.create(chunk, on(0, driver.HandlePosixFD))
	f := a.export(h)
	i, res := b.importFD(f)
	b.ok(res)
	p, q := a.mapHandle(h), b.mapHandle(i)
	s, u := a.stream(driver.StreamNonBlocking), b.stream(driver.StreamNonBlocking)
	a.ok(a.StreamWaitValue64(a.ctx, s, p+64, 5))
	time.Sleep(2 * laziness)
	a.is(driver.NotReady, a.StreamQuery(a.ctx, s))
	b.ok(b.StreamWriteValue64(b.ctx, u, q+64, 5))
	a.ok(a.StreamSynchronize(a.ctx, s))
	a.ok(a.MemRelease(h))
	b.ok(b.MemRelease(i))
}

// However many streams wait, looking allocates nothing, and seldom happens.
func TestWaitingForWordsIsCheap(t *testing.T) {
	r := start(t, Options{})
	words := r.pinned(wordsPage)
	p, res := r.MemHostGetDevicePointer(r.ctx, pointer(words))
	r.ok(res)
	s := r.stream(driver.StreamNonBlocking)
	r.ok(r.StreamWaitValue64(r.ctx, s, p, 1))
	r.m.mu.Lock()
	at := site{gpuContext: r.m.contexts[r.ctx], stream: r.m.streams[s]}
	require.Zero(t, testing.AllocsPerRun(100, func() { _ = r.m.reached(at, p, 1) }))
	r.m.mu.Unlock()
	require.GreaterOrEqual(t, pollAfter(1000), 500*time.Microsecond)
	wordAt(words, 0).Store(1)
	r.ok(r.StreamSynchronize(r.ctx, s))
}
