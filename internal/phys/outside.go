package phys

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"weak"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// outside says how others got at the memory of a handle, for reports. It is of the memory, and not
// of the handle: Give forgets it.
type outside struct{ known atomic.Pointer[known] }

// known does not change: another takes its place.
type known struct {
	first, last sent // that they got it for ever
	times       int
	dmabufs     []dmabuf
}

// sent is how a process got the memory, as "sent to process 4711".
type sent struct {
	how string
	at  time.Time
}

func (s sent) String() string { return s.how + " at " + s.at.Format(time.TimeOnly) }

// dmabuf is a DMA-BUF. Its file is closed, or has no user any more, when the memory is not pinned by it.
type dmabuf struct {
	file weak.Pointer[os.File]
	at   time.Time
}

func (d dmabuf) open() bool {
	f := d.file.Value()
	if f == nil {
		return false
	}
	c, err := f.SyscallConn()
	return err == nil && c.Control(func(uintptr) {}) == nil
}

// change replaces what is known.
func (o *outside) change(f func(k *known)) {
	for {
		old, k := o.known.Load(), known{}
		if old != nil {
			k = *old
		}
		f(&k)
		if o.known.CompareAndSwap(old, &k) {
			return
		}
	}
}

// NoteSent notes how another process got the memory: "sent to process 4711".
func (h *Handle) NoteSent(how string, at time.Time) {
	h.outside.change(func(k *known) {
		if k.last = (sent{how, at}); k.times == 0 {
			k.first = k.last
		}
		k.times++
	})
}

// NoteDMABuf notes a DMA-BUF of the memory.
func (h *Handle) NoteDMABuf(f *os.File, at time.Time) {
	h.outside.change(func(k *known) {
		k.dmabufs = append(openOf(k.dmabufs), dmabuf{weak.Make(f), at})
	})
}

// openOf returns those that are open, in memory of their own.
func openOf(all []dmabuf) (open []dmabuf) {
	return slices.DeleteFunc(slices.Clone(all), func(d dmabuf) bool { return !d.open() })
}

// Sent says how other processes got the memory, and "" if that is not known.
func (h *Handle) Sent() string {
	switch k := h.outside.known.Load(); {
	case k == nil || k.times == 0:
		return ""
	case k.times == 1:
		return fmt.Sprintf("it was %v", k.first)
	case k.times == 2:
		return fmt.Sprintf("it was %v, and %v", k.first, k.last)
	default:
		return fmt.Sprintf("it was %v, and %d times more, the last time %v", k.first, k.times-1, k.last)
	}
}

// DMABufs says which DMA-BUFs of the memory are open in this process, and "" if there are none.
func (h *Handle) DMABufs() string {
	k := h.outside.known.Load()
	if k == nil {
		return ""
	}
	open := openOf(k.dmabufs)
	if len(open) == 0 {
		return ""
	}
	var at []string
	for _, d := range open[:min(len(open), 3)] {
		at = append(at, d.at.Format(time.TimeOnly))
	}
	return fmt.Sprintf("%s of %s", errs.Count(len(open), "open DMA-BUF"), strings.Join(at, ", "))
}
