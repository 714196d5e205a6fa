package pool

import (
	"fmt"
	"path"
	"runtime"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/internal/core"
)

// site is the stack that allocated a block.
type site struct {
	pcs [24]uintptr
	n   int
}

func caller() (s site) {
	s.n = runtime.Callers(2, s.pcs[:])
	return s
}

// frames are the callers that are not this package's own.
func (s *site) frames() (of []runtime.Frame) {
	frames := runtime.CallersFrames(s.pcs[:s.n])
	for more := true; more; {
		var f runtime.Frame
		f, more = frames.Next()
		own := strings.HasPrefix(f.Function, "github.com/cuvmm/cuvmm/vmm/pool.") && !strings.HasSuffix(f.File, "_test.go")
		if f.Function != "" && !own && !strings.HasPrefix(f.Function, "runtime.") {
			of = append(of, f)
		}
	}
	return of
}

// Live is a live block.
type Live struct {
	Block Block
	Tag   Tag
	// Stack is who allocated it, the innermost caller first, with
	// Options.Track.
	Stack []runtime.Frame
}

// String says what the block is, and where it was allocated: "1 MiB at 0x...
// (weights), allocated at model.go:12".
func (l Live) String() string {
	s := fmt.Sprintf("%s at %v", core.Bytes(l.Block.bytes), l.Block.ptr)
	if l.Tag != 0 {
		s += fmt.Sprintf(" (%v)", l.Tag)
	}
	if len(l.Stack) > 0 {
		s += fmt.Sprintf(", allocated at %s:%d", path.Base(l.Stack[0].File), l.Stack[0].Line)
	}
	return s
}

// Live lists the live blocks, by address.
func (p *Pool) Live() []Live {
	var all []Live
	p.each(func(h *header) {
		l := Live{Block: h.block(), Tag: h.tag}
		if w := h.home.shard.watch; w != nil {
			if s, ok := w.sites[h]; ok {
				l.Stack = s.frames()
			}
		}
		all = append(all, l)
	})
	slices.SortFunc(all, func(a, b Live) int {
		if a.Block.ptr < b.Block.ptr {
			return -1
		}
		return 1
	})
	return all
}
