package sim

import (
	"sync/atomic"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// atomicWord is a 64-bit word of memory that the CPU and other devices access too.
type atomicWord = atomic.Uint64

// word is the word at the start of b, which must be aligned.
func word(b []byte) *atomicWord { return (*atomicWord)(unsafe.Pointer(unsafe.SliceData(b))) }

const wordSize = 8

func (s *stream) checkWord(call driver.Call, p driver.Ptr) driver.Result {
	switch {
	case s.context.device.attributes[driver.AttrStreamMemOps64] == 0:
		return driver.NotSupported
	case p%wordSize != 0 || s.m.missing(call, uint64(p), wordSize):
		return driver.InvalidValue
	}
	return driver.Success
}

func (a *api) StreamWriteValue64(c driver.Context, h driver.Stream, p driver.Ptr, v uint64) driver.Result {
	s, r := a.enterStream(driver.CallStreamWriteValue64, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	if r := s.checkWord(driver.CallStreamWriteValue64, p); r != driver.Success {
		return r
	}
	_, r = s.submit(task{run: func(at site) *fault {
		to, f := a.m.pinWord(at, driver.CallStreamWriteValue64, uint64(p), wordSize, driver.AccessReadWrite)
		if f != nil {
			return f
		}
		defer to.release()
		word(to.runs[0]).Store(v)
		return nil
	}})
	return r
}

func (a *api) StreamWaitValue64(c driver.Context, h driver.Stream, p driver.Ptr, v uint64) driver.Result {
	const call = driver.CallStreamWaitValue64
	s, r := a.enterStream(call, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	if r := s.checkWord(call, p); r != driver.Success {
		return r
	}
	m := a.m
	_, r = s.submit(task{
		ready: func(at site) bool { return m.reached(at, p, v) },
		run: func(at site) *fault {
			m.mu.Lock()
			defer m.mu.Unlock()
			_, f := m.locate(at, call, uint64(p), wordSize, driver.AccessRead)
			at.op.acquire()
			return f
		},
	})
	return r
}

// reached reports whether a wait for a value is over, or cannot succeed because the word
// cannot be read. The CPU and other processes change words unseen, so the engine polls it,
// and it allocates nothing if the word lies in host memory.
func (m *Machine) reached(at site, p driver.Ptr, v uint64) bool {
	if r, ok := m.backing.find(uint64(p)); ok && r.v.host != nil && r.hi-uint64(p) >= wordSize {
		return int64(word(r.v.host[uint64(p)-r.lo:]).Load()-v) >= 0
	}
	from, f := m.locate(at, driver.CallStreamWaitValue64, uint64(p), wordSize, driver.AccessRead)
	return f != nil || int64(word(from.runs[0]).Load()-v) >= 0
}
