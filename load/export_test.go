package load

import (
	"sync"
	"time"
)

// Slow has the model's files stand in for storage that has few bytes a second for all readers
// together, and that the page cache has nothing of.
func (m *Model) Slow(rate int) {
	s := &storage{rate: rate}
	for _, f := range m.files {
		f.contents = slow{f.contents, s}
	}
}

type storage struct {
	rate int
	mu   sync.Mutex
	free time.Time
}

type slow struct {
	contents
	*storage
}

func (slow) Align() int { return 512 }

func (slow) Cached([]byte, int64) (n int, known bool) { return 0, true }

func (s slow) ReadDirect(p []byte, offset int64) (n int, err error) {
	return len(p), s.ReadAt(p, offset)
}

func (s slow) ReadAt(p []byte, offset int64) error {
	s.mu.Lock()
	if now := time.Now(); s.free.Before(now) {
		s.free = now
	}
	s.free = s.free.Add(time.Duration(len(p)) * time.Second / time.Duration(s.rate))
	ready := s.free
	s.mu.Unlock()
	time.Sleep(time.Until(ready))
	return s.contents.ReadAt(p, offset)
}
