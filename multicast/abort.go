package multicast

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
)

// ErrAborted is returned after kernels that waited for other ranks were told to stop: their
// results, and those of the work behind them, are incomplete.
var ErrAborted = errors.New("kernels that waited for other ranks were told to stop")

// abortWord is a uint32 in pinned host memory, which kernels poll while they wait: the CPU
// can write it when no stream makes progress. Its lock is a leaf.
type abortWord struct {
	buffer *cuda.HostBuffer
	mu     sync.Mutex
	gone   bool
}

func newAbortWord(d *cuda.Device) (*abortWord, error) {
	b, err := d.NewHostBuffer(4)
	if err != nil {
		return nil, err
	}
	w := &abortWord{buffer: b}
	w.value().Store(0)
	return w, nil
}

func (w *abortWord) value() *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(unsafe.SliceData(w.buffer.Bytes())))
}

func (w *abortWord) set() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.gone {
		w.value().Store(1)
	}
}

func (w *abortWord) isSet() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.gone && w.value().Load() != 0
}

// close frees the word. No kernel uses it any more.
func (w *abortWord) close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gone = true
	return core.CloseUnused(w.buffer)
}

// AbortWord returns the address of a uint32 that is 0 until Abort. Kernels that wait for
// other ranks poll it, as kernels.Barrier and kernels.L2Norm do.
func (t *Team) AbortWord() cuda.Ptr {
	if !t.formed {
		return 0
	}
	return t.word.buffer.Ptr()
}

// Abort ends the waits of this rank's kernels that poll AbortWord, now and from then on, so
// that their streams make progress. It waits for nothing, breaks no capture, and may be
// called at any time, even while Leave or Close waits. The kernels' results are incomplete,
// and the team can only be closed. Abort does not tell the other ranks; Leave does.
//
// Work behind such a kernel on its stream then runs. It must not access the team's address
// if a rank has died: that rank's replica is gone.
func (t *Team) Abort() {
	if t.formed {
		t.word.set()
	}
}

func abortedError(op string, limit time.Duration) error {
	return fmt.Errorf("%s: %w: GPU work had not ended after %v, and did when it was told to; see which rank they waited for", op, ErrAborted, limit)
}
