package pool

import (
	"fmt"
	"sync/atomic"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// arena is what the blocks of a capture lie in.
type arena struct{}

// Capture is a capture of a graph that the pool knows of.
type Capture struct{ over atomic.Bool }

// capturing is the capture that a stream takes part in, or nil.
func (p *Pool) capturing(op string, st *core.Stream, _ *want) (*Capture, error) {
	status, id, r := st.Capture()
	if r != driver.Success {
		return nil, st.Ctx.Fail(op, driver.CallStreamGetCaptureInfo, r, fmt.Sprintf("stream %#x", uintptr(st.Handle)))
	}
	if status == driver.CaptureNone {
		return nil, nil
	}
	return nil, core.Error(core.Failure{Op: op, Kind: core.Capturing, Asked: fmt.Sprintf("stream %#x takes part in capture %d, which the pool does not know", uintptr(st.Handle), id),
		Hint: "allocate before the capture begins"})
}

func (c *Capture) alloc(*core.Stream, *want) (Block, error) { return Block{}, nil }

func (p *Pool) freeCaptured(*header, ...point) error { return nil }
