package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// graph is what was captured.
type graph struct {
	handle driver.Graph
	object *object
	nodes  []*node
	leases []*lease
}

// graphExec is a graph that can be launched. Its launches do not overlap.
type graphExec struct {
	handle  driver.GraphExec
	object  *object
	nodes   []*node
	leases  []*lease
	last    *op
	context *gpuContext
}

// newGraph takes over the leases.
func (m *Machine) newGraph(nodes []*node, leases []*lease) driver.Graph {
	g := &graph{handle: driver.Graph(newHandle()), nodes: nodes, leases: leases}
	g.object = m.track(KindGraph, uint64(g.handle), 0)
	m.graphs[g.handle] = g
	return g.handle
}

func (a *api) GraphInstantiate(c driver.Context, h driver.Graph) (driver.GraphExec, driver.Result) {
	ctx, r := a.enterContext(driver.CallGraphInstantiate, c)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	g := a.m.graphs[h]
	if g == nil {
		return 0, driver.InvalidValue
	}
	e := &graphExec{handle: driver.GraphExec(newHandle()), nodes: g.nodes, leases: g.leases, context: ctx}
	e.object = a.m.track(KindGraphExec, uint64(e.handle), 0)
	holdAll(e.leases)
	a.m.execs[e.handle] = e
	return e.handle, driver.Success
}

func (a *api) GraphLaunch(c driver.Context, h driver.GraphExec, sh driver.Stream) driver.Result {
	s, r := a.enterStream(driver.CallGraphLaunch, c, sh)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	e := a.m.execs[h]
	if e == nil {
		return driver.InvalidValue
	}
	if s.joined != nil && len(e.leases) > 0 {
		return driver.NotSupported // a graph in a graph cannot allocate
	}
	for _, l := range e.leases {
		if r := l.furnish(); r != driver.Success {
			return r
		}
	}
	t := a.m.graphTask(e.nodes)
	t.after = func() { dropAll(e.leases) }
	holdAll(e.leases) // now: the graph may be destroyed while this waits
	o, r := s.submit(t, e.last)
	if o == nil {
		dropAll(e.leases)
		return r
	}
	e.last = o
	return r
}

// graphTask does the work of all nodes, in an order that their dependencies
// allow. Whatever fails, the result is that the launch failed: so does a launch after
// the module of a kernel was unloaded.
func (m *Machine) graphTask(nodes []*node) task {
	t := task{}
	for _, n := range nodes {
		t.long = t.long || n.long || n.ready != nil
		t.kernels = append(t.kernels, n.kernels...)
	}
	for _, f := range t.kernels {
		if m.modules[f.module.handle] != f.module {
			lost := &fault{driver.LaunchFailed, fmt.Sprintf(
				"a graph was launched after the module of its kernel %s was unloaded: destroy the graph first, or unload the module later", f.entry.name)}
			t.run = func(site) *fault { return lost }
			return t
		}
	}
	t.run = func(at site) *fault {
		for _, n := range m.shuffled(nodes) {
			if !m.awaitNode(n, at) {
				return nil
			}
			if n.run == nil {
				continue
			}
			if f := n.run(n.in(at)); f != nil {
				return &fault{driver.LaunchFailed, "in a launched graph: " + f.text}
			}
		}
		return nil
	}
	return t
}

// awaitNode waits until a node can begin, and reports whether it still may: the
// machine may be closed, or the context lost.
func (m *Machine) awaitNode(n *node, at site) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for polls := 0; m.outcome(n.context) == driver.Success; polls++ {
		if n.ready == nil || n.ready(n.in(at)) {
			return true
		}
		m.mu.Unlock()
		time.Sleep(pollAfter(polls))
		m.mu.Lock()
	}
	return false
}

// shuffled puts nodes into one of the orders that their dependencies allow.
func (m *Machine) shuffled(nodes []*node) []*node {
	m.mu.Lock()
	defer m.mu.Unlock()
	next := map[*node][]*node{}
	missing := map[*node]int{}
	var ready, order []*node
	for _, n := range nodes {
		missing[n] = len(n.deps)
		for _, d := range n.deps {
			next[d] = append(next[d], n)
		}
		if len(n.deps) == 0 {
			ready = append(ready, n)
		}
	}
	for len(ready) > 0 {
		i := m.rng.IntN(len(ready))
		n := ready[i]
		ready = slices.Delete(ready, i, i+1)
		order = append(order, n)
		for _, d := range next[n] {
			if missing[d]--; missing[d] == 0 {
				ready = append(ready, d)
			}
		}
	}
	return order
}

func (a *api) GraphGetNodeCount(h driver.Graph) (uint64, driver.Result) {
	if r := a.enter(driver.CallGraphGetNodeCount); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	g := a.m.graphs[h]
	if g == nil {
		return 0, driver.InvalidValue
	}
	return uint64(len(g.nodes)), driver.Success
}

func (a *api) GraphDestroy(h driver.Graph) driver.Result {
	if r := a.enter(driver.CallGraphDestroy); r != driver.Success {
		return r
	}
	defer a.leave()
	g := a.m.graphs[h]
	if g == nil {
		return driver.InvalidValue
	}
	a.m.untrack(g.object)
	delete(a.m.graphs, h)
	dropAll(g.leases)
	return driver.Success
}

// GraphExecDestroy does not wait: a launch that is still to be done is done.
func (a *api) GraphExecDestroy(h driver.GraphExec) driver.Result {
	if r := a.enter(driver.CallGraphExecDestroy); r != driver.Success {
		return r
	}
	defer a.leave()
	e := a.m.execs[h]
	if e == nil {
		return driver.InvalidValue
	}
	a.m.dropExec(e)
	return driver.Success
}

func (m *Machine) dropExec(e *graphExec) {
	m.untrack(e.object)
	delete(m.execs, e.handle)
	dropAll(e.leases)
}
