package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/vmm/pool/trace"
)

// mode is a way to replay a trace.
type mode struct {
	name       string
	work       bool // every block is worked on over its length
	streams    int  // over which the operations of a trace with one stream are spread
	goroutines int  // that replay a copy of the trace each, its blocks as much smaller
}

// runLength is how many operations in a row a spread trace has on one stream.
// scripts/pool-peers.py spreads in the same way.
const runLength = 256

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
			return nil, fmt.Errorf("-modes %s: there is no mode %q: use idle, behind, streams, goroutines or all", names, name)
		}
		chosen = append(chosen, all[i])
	}
	return chosen, nil
}

// of is the trace as each goroutine of the mode replays it.
func (m mode) of(t *trace.Trace) *trace.Trace {
	if t.Streams > 1 && m.goroutines == 1 || m.streams == 1 && m.goroutines == 1 {
		return t
	}
	c := *t
	c.Ops = slices.Clone(t.Ops)
	spread := t.Streams == 1 && m.streams > 1
	if spread {
		c.Streams = m.streams
	}
	for i := range c.Ops {
		op := &c.Ops[i]
		if op.Kind != trace.Alloc {
			continue
		}
		op.Bytes = (op.Bytes + m.goroutines - 1) / m.goroutines
		if spread {
			op.Stream = uint32(i / runLength % m.streams)
		}
	}
	return &c
}
