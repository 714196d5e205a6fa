package sim

import (
	"runtime"
	"slices"
)

// trail is what precedes an op, for a machine that looks for races. It is a
// happens-before relation on what was seen to happen: streams, events, the host's waits,
// host functions and words of memory order work. Wherever the program could have ordered
// two ops, they count as ordered, so that no race is reported that is none.
type trail struct {
	behind map[*stream]uint64 // the last op of each other stream that it waits for
	floor  uint64             // what was released before then precedes it
	open   []*touch           // that nothing has released yet
	races  []*op              // that are reported
	stack  stack              // of its submission
}

// followed reports whether the op has a trail. Of work that is no op there is nil.
func (o *op) followed() bool { return o != nil && o.trail != nil }

// follow begins the trail of an op that was just submitted: it comes behind the work that
// the stream's earlier ops and its own dependencies come behind.
func (o *op) follow() {
	s := o.stream
	if !s.m.options.Races {
		return
	}
	o.trail = &trail{floor: o.order}
	runtime.Callers(4, o.trail.stack[:])
	if len(o.deps) > 0 {
		behind := map[*stream]uint64{}
		merge := func(other *stream, order uint64) {
			if len(other.queue) > 0 && other.queue[0].order <= order { // else it was done, and floor says so
				behind[other] = max(behind[other], order)
			}
		}
		for other, order := range s.behind {
			merge(other, order)
		}
		for _, d := range o.deps {
			merge(d.stream, d.order)
			for other, order := range d.trail.behind {
				merge(other, order)
			}
		}
		s.behind = behind
	}
	o.trail.behind = s.behind
}

// begin passes on to an op what the work before it acquired.
func (o *op) begin() {
	if !o.followed() {
		return
	}
	o.trail.floor = max(o.trail.floor, o.stream.floor)
	for _, d := range o.deps {
		o.trail.floor = max(o.trail.floor, d.trail.floor)
	}
}

// end releases what the op touched.
func (o *op) end() {
	if o.followed() {
		o.release()
		o.stream.floor = max(o.stream.floor, o.trail.floor)
	}
}

// release lets what the op has touched so far precede whatever acquires or is submitted
// later: it writes a word, calls the host, or is done.
func (o *op) release() {
	if !o.followed() {
		return
	}
	now := created.Add(1)
	for _, t := range o.trail.open {
		t.released = now
	}
	o.trail.open = nil
}

// acquire puts what the op does from now on behind all that was released before: it has
// read a word, or the host returned to it.
func (o *op) acquire() {
	if o.followed() {
		o.trail.floor = created.Add(1)
	}
}

// release is [op.release] for work that runs without the machine's lock.
func (at site) release() { at.locked((*op).release) }

// acquire is [op.acquire] for work that runs without the machine's lock.
func (at site) acquire() { at.locked((*op).acquire) }

func (at site) locked(do func(*op)) {
	if !at.op.followed() {
		return
	}
	at.m.mu.Lock()
	defer at.m.mu.Unlock()
	do(at.op)
}

// precedes reports whether what an op has touched comes before what another, which runs
// now, touches at the given nodes of its graph.
func (t *touch) precedes(o *op, nodes []*node) bool {
	switch {
	case t.op == o:
		return nodesOrdered(t.nodes, nodes)
	case t.op.stream == o.stream:
		return true
	}
	return t.released != 0 && t.released < o.trail.floor || o.trail.behind[t.op.stream] >= t.op.order
}

// nodesOrdered reports whether the graph orders two places in one launch. A place is a
// node, behind those of the graphs that contain its own.
func nodesOrdered(a, b []*node) bool {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return ancestors([]*node{b[i]})[a[i]]
		}
	}
	return true
}

// oldest returns when the oldest work was submitted that is not done: what was released
// before precedes all that is still to come.
func (e *engine) oldest() uint64 {
	at := created.Load()
	for _, s := range e.active {
		if len(s.queue) > 0 {
			at = min(at, s.queue[0].order)
		}
	}
	return at
}

// in returns the site of a node's work, for a launch of its graph at a site.
func (n *node) in(at site) site {
	at.gpuContext = n.context
	if !at.op.followed() {
		return at
	}
	at.nodes = append(slices.Clip(at.nodes), n)
	return at
}
