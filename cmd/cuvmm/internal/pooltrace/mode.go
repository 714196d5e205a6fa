package pooltrace

import (
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/internal/poolreplay"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
)

// mode is a way to replay a trace.
type mode struct {
	name       string
	work       bool // every block is worked on over its length
	streams    int  // over which the operations of a trace with one stream are spread
	goroutines int  // that replay a copy of the trace each, its blocks as much smaller
}

func modes(many int) []mode {
	return []mode{
		{name: "idle", streams: 1, goroutines: 1},
		{name: "behind", work: true, streams: 1, goroutines: 1},
		{name: "streams", work: true, streams: many, goroutines: 1},
		{name: "goroutines", work: true, streams: 1, goroutines: many},
	}
}

func chooseModes(names string, many int) ([]mode, error) {
	all := modes(many)
	if names == "all" {
		return all, nil
	}
	var chosen []mode
	for _, name := range strings.Split(names, ",") {
		i := slices.IndexFunc(all, func(m mode) bool { return m.name == name })
		if i < 0 {
			return nil, wrong("-modes %s: there is no mode %q: use idle, behind, streams, goroutines or all", names, name)
		}
		chosen = append(chosen, all[i])
	}
	return chosen, nil
}

// of is the trace as each goroutine of the mode replays it.
func (m mode) of(t *trace.Trace) *trace.Trace {
	if m.goroutines == 1 {
		return poolreplay.Spread(t, m.streams)
	}
	c := *t
	c.Ops = slices.Clone(t.Ops)
	for i := range c.Ops {
		if op := &c.Ops[i]; op.Kind == trace.Alloc {
			op.Bytes = (op.Bytes + m.goroutines - 1) / m.goroutines
		}
	}
	return &c
}
