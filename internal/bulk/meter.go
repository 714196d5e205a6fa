package bulk

import (
	"sync/atomic"
	"time"
)

// Meter counts the bytes of one or several operations. The zero value is ready, and a nil one
// counts nothing. Any goroutine may read it.
type Meter struct {
	done, total atomic.Uint64
	began       atomic.Int64 // in nanoseconds since 1970; 0 before the first operation
}

// Progress is how far operations have come.
type Progress struct {
	Done, Total uint64        // bytes
	Rate        float64       // bytes a second since the first operation began
	Remaining   time.Duration // at that rate; 0 before the first byte
}

// Progress returns how far the operations have come that have begun.
func (m *Meter) Progress() Progress {
	p := Progress{Done: m.done.Load(), Total: m.total.Load()}
	if spent := time.Since(time.Unix(0, m.began.Load())).Seconds(); p.Done > 0 && spent > 0 {
		p.Rate = float64(p.Done) / spent
		p.Remaining = time.Duration(float64(p.Total-min(p.Done, p.Total)) / p.Rate * float64(time.Second))
	}
	return p
}

// begin adds the bytes that an operation is to move.
func (m *Meter) begin(bytes uint64) {
	if m != nil {
		m.began.CompareAndSwap(0, time.Now().UnixNano())
		m.total.Add(bytes)
	}
}

func (m *Meter) add(bytes uint64) {
	if m != nil {
		m.done.Add(bytes)
	}
}
