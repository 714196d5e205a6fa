//go:build linux

package vmm_test

import (
	"context"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/suspend"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// gated is a buffer of one chunk in some state.
type gated struct {
	*world
	s     vmm.Slice[byte] // its first bytes
	mem   share.Memory
	chunk *phys.Handle // to attach, if it is of imported memory
	hold  share.Hold   // for methods of a hold
	other *vmm.Buffer  // another, to copy from
	wake  []func()     // before the end, the last first
}

func (g *gated) end() {
	for _, wake := range slices.Backward(g.wake) {
		wake()
	}
	g.world.end()
}

// ways are the methods by which a buffer is used, and the operation that each is for the
// gate; "" asks nothing.
var ways = []struct {
	on, method, operation string
	do                    func(g *gated) error
}{
	{"Buffer", "Grow", "resizing", func(g *gated) error { return g.b.Grow(2 * kib64) }},
	{"Buffer", "AppendUndefined", "resizing", func(g *gated) error { return gputest.Err(g.b.AppendUndefined(2 * kib64)) }},
	{"Buffer", "Append", "resizing", func(g *gated) error { return gputest.Err(g.b.Append(nil, make([]byte, 2*kib64))) }},
	{"Buffer", "AppendHost", "resizing", func(g *gated) error { return gputest.Err(g.b.AppendHost(nil, g.host.All())) }},
	{"Buffer", "AppendPtr", "resizing", func(g *gated) error { return gputest.Err(g.b.AppendPtr(nil, g.other.Ptr(), 2*kib64)) }},
	{"Buffer", "AppendSlice", "resizing", func(g *gated) error {
		from, err := g.other.Slice(0, 2*kib64)
		require.NoError(g.t, err)
		return gputest.Err(g.b.AppendSlice(nil, from))
	}},
	{"Buffer", "Resize", "resizing", func(g *gated) error { return g.b.Resize(nil, 3*kib64) }},
	{"Buffer", "Resize shorter", "shortening", func(g *gated) error { return g.b.Resize(nil, 10) }},
	{"Buffer", "Clip", "clipping", func(g *gated) error { return g.b.Clip() }},
	{"Buffer", "ClipAfter", "clipping", func(g *gated) error { return g.b.ClipAfter(g.world.s) }},
	{"Buffer", "Move", "moving", func(g *gated) error { return g.owning(g.b.Move(vmm.MoveOptions{})) }},
	{"Buffer", "Fork", "forking", func(g *gated) error { return g.owning(g.b.Fork(nil, 10, vmm.ForkOptions{})) }},
	{"Buffer", "SetAccess", "granting", func(g *gated) error {
		return g.b.SetAccess(vmm.Access{Location: g.peer.Location(), Mode: vmm.ReadWrite})
	}},
	{"Buffer", "SetAccess lower", "revoking", func(g *gated) error {
		return g.b.SetAccess(vmm.Access{Location: g.d.Location(), Mode: vmm.ReadOnly})
	}},
	{"Buffer", "DMABuf", "exporting", func(g *gated) error {
		f, err := g.b.DMABuf(0, kib64, vmm.DMABufOptions{})
		if err == nil {
			err = f.Close()
		}
		return err
	}},
	{"Buffer", "Granted", "exporting", func(g *gated) error { return gputest.Err(g.b.Granted()) }},
	{"Buffer", "Close", "", func(g *gated) error { return g.b.Close() }},
	{"Buffer", "CloseAfter", "", func(g *gated) error { return g.b.CloseAfter(g.world.s) }},

	{"Slice", "CopyFrom", "writing", func(g *gated) error { return g.s.CopyFrom(nil, make([]byte, 10)) }},
	{"Slice", "CopyFromHost", "writing", func(g *gated) error { return g.s.CopyFromHost(nil, g.few()) }},
	{"Slice", "CopyFromSlice", "writing", func(g *gated) error { return g.s.CopyFromSlice(nil, g.otherSlice()) }},
	{"Slice", "Zero", "writing", func(g *gated) error { return g.s.Zero(nil) }},
	{"Slice", "CopyTo", "reading", func(g *gated) error { return g.s.CopyTo(nil, make([]byte, 10)) }},
	{"Slice", "CopyToHost", "reading", func(g *gated) error { return g.s.CopyToHost(nil, g.few()) }},
	{"Slice", "Host", "hosting", func(g *gated) error { return g.s.Host(func([]byte) error { return nil }) }},

	{"Memory", "View", "exporting", func(g *gated) error {
		v, err := g.mem.View(testOp, 10)
		require.NoError(g.t, v.Release())
		return err
	}},
	{"Memory", "Hold", "holding", func(g *gated) error {
		h, err := g.mem.Hold(testOp, "test", 10)
		if err == nil {
			h.Release()
		}
		return err
	}},
	{"Memory", "Attach", "resizing", func(g *gated) error {
		err := g.mem.Attach(testOp, []*phys.Handle{g.chunk})
		if err == nil {
			g.chunk.Retain()
		}
		return err
	}},
	{"Memory", "SetLen", "following", func(g *gated) error { return g.mem.SetLen(testOp, 1) }},
	{"Memory", "Own", "following", func(g *gated) error { return g.mem.Own(testOp) }},
	{"Memory", "Seal", "moving", func(g *gated) error { return g.mem.Seal(testOp, "this") }},
	{"Hold", "Cover", "holding", func(g *gated) error { return g.hold.Cover(testOp, 1) }},
	{"Hold", "Begin", "following", func(g *gated) error {
		c, err := g.hold.Begin(testOp)
		if err == nil {
			_, err = c.Shrink(5, nil)
			require.NoError(g.t, c.End())
		}
		return err
	}},
	{"Hold", "Release", "", func(g *gated) error { g.hold.Release(); return nil }},

	{"package", "Suspend", "sleeping", func(g *gated) error { return g.sleeping(vmm.Suspend(g.ctx(), vmm.SuspendOptions{}, g.b)) }},
	{"package", "SuspendAfter", "sleeping", func(g *gated) error {
		return g.sleeping(vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{g.far}, g.b))
	}},

	{"change", "job", "catchingUp", func(g *gated) error { return vmm.Allow(g.b, "catchingUp") }},
	{"reclaimer", "job", "reclaiming", func(g *gated) error { return g.drain() }},
}

// others ask nothing: they read what never needs memory, or end a buffer that no user has.
var others = map[string][]string{
	"Buffer": {"Device", "Len", "Name", "Ptr", "Released", "Requested", "Slice", "Stats", "Tag"},
	"Array":  {"All", "Buffer", "Cap"}, // the others are those of Buffer
	"Slice":  {"Len", "Ptr", "Size", "Slice"},
	"Memory": {"Abandon", "About", "SetKept", "Committed", "Leave", "Used"},
	"Hold":   {"RecallBy"},
}

func (g *gated) otherSlice() vmm.Slice[byte] {
	s, err := g.other.Slice(0, 10)
	require.NoError(g.t, err)
	return s
}

func (g *gated) few() cuda.HostSlice {
	s, err := g.host.Slice(0, 10)
	require.NoError(g.t, err)
	return s
}

// sleeping has a suspended buffer wake before it is closed.
func (g *gated) sleeping(s *vmm.Suspension, err error) error {
	if err == nil {
		g.wake = append(g.wake, func() { require.NoError(g.t, s.Resume(g.ctx())) })
	}
	return err
}

// asleep suspends the buffer, up to a state.
func (g *gated) asleep(state string) {
	switch state {
	case "suspending":
		g.m.Hold(g.far.Handle())
		require.NoError(g.t, g.sleeping(vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{g.far}, g.b)))
		g.wake = append(g.wake, func() { g.m.Release(g.far.Handle()) })
	case "suspended":
		require.NoError(g.t, g.sleeping(vmm.Suspend(g.ctx(), vmm.SuspendOptions{}, g.b)))
	case "resuming":
		fill := blockingSource{make(chan struct{}), make(chan struct{})}
		s, err := vmm.Suspend(g.ctx(), vmm.SuspendOptions{Source: fill}, g.b)
		require.NoError(g.t, err)
		resumed := make(chan error)
		go func() { resumed <- s.Resume(g.ctx()) }()
		<-fill.begun
		g.wake = append(g.wake, func() { close(fill.end); require.NoError(g.t, <-resumed) })
	}
}

// blockingSource stays in Fill.
type blockingSource struct{ begun, end chan struct{} }

func (b blockingSource) Fill(context.Context, *cuda.Stream, vmm.Memory, cuda.Ptr, int) error {
	close(b.begun)
	<-b.end
	return nil
}

// unfollowed is a publication that no process follows.
type unfollowed struct{}

func (unfollowed) MayRecall(string) error { return nil }
func (unfollowed) Recall(context.Context, string, time.Duration) ([]suspend.Late, error) {
	return nil, nil
}
func (unfollowed) Show(bool)              {}
func (unfollowed) Memory() []*phys.Handle { return nil }

func (g *gated) owning(b *vmm.Buffer, err error) error {
	if err == nil {
		g.own(b)
	}
	return err
}

// newGated makes a buffer in a state for a method. For the reclaimer's job its clipped chunks
// wait for the stream.
func newGated(t *testing.T, state, on, method string) *gated {
	g := &gated{world: newWorld(t, false)}
	g.pinned(2 * kib64)
	g.other = g.buffer(3)
	unit, memory := kib64, vmm.Properties{}
	if method == "Host" {
		unit, memory = 2*mib, vmm.Properties{Location: cuda.OnHostNUMA(0)}
	}
	o := vmm.BufferOptions{Reserve: 16 * unit, Chunks: vmm.FixedChunks(unit), Memory: memory}
	b, err := vmm.NewBuffer(g.d, o)
	require.NoError(t, err)
	g.own(b)
	require.NoError(t, gputest.Err(b.Append(nil, pattern(3*unit, 1))))
	if importsMemory(method) {
		all := imports(t, b, 3*kib64)
		g.chunk = imports(t, b, 1)[0]
		chunk := g.chunk
		g.own(closerFunc(func() error { return chunk.Let(testOp) }))
		o := importing(b, kib64, all)
		o.Reserve = 16 * kib64
		made, err := share.NewBuffer(testOp, o)
		require.NoError(t, err)
		b = made.(*vmm.Buffer)
		g.own(b)
	}
	g.b, g.mem = b, share.Of(b)
	require.NoError(t, b.Resize(nil, unit))
	g.part(0, 10)
	g.s = g.slice
	switch {
	case state == "failed":
		g.m.Inject(sim.Fault{Call: "cuMemUnmap", Times: 1, Result: code})
		require.Error(t, b.Clip())
	case on == "reclaimer":
		if state == "suspended" {
			g.asleep(state)
		}
		g.m.Hold(g.world.s.Handle())
		require.NoError(t, b.ClipAfter(g.world.s))
	default:
		require.NoError(t, b.Clip())
	}
	if state == "moved" {
		require.NoError(t, g.owning(b.Move(vmm.MoveOptions{})))
	}
	if on == "Hold" {
		g.hold, err = g.mem.Hold(testOp, "test", 10)
		require.NoError(t, err)
		g.hold.RecallBy(unfollowed{})
		g.own(closerFunc(func() error { g.hold.Release(); return nil }))
	}
	if vmm.StateOf(b) != state {
		g.asleep(state)
	}
	require.Equal(t, state, vmm.StateOf(b))
	return g
}

// importsMemory reports whether a method is that of imported memory.
func importsMemory(method string) bool {
	return method == "Attach" || method == "SetLen" || method == "Seal"
}

// impossible reports whether no buffer of a state can be used in a way.
func impossible(state, on, method string) bool {
	moving := state == "suspending" || state == "resuming"
	switch {
	case on == "Hold": // a buffer that is held does not move, and one that was moved is not held
		return state == "moved"
	case importsMemory(method): // memory of another process does not sleep
		return moving || state == "suspended"
	case on == "reclaimer": // whoever moves the bytes has settled what was clipped
		return moving
	case method == "Close": // waits until the bytes have moved
		return moving
	}
	return false
}

// Each state permits what the gate says, by every way in to a buffer.
func TestTheGate(t *testing.T) {
	for _, state := range vmm.StateNames {
		for _, way := range ways {
			if impossible(state, way.on, way.method) {
				continue
			}
			t.Run(state+"/"+way.on+"."+way.method, func(t *testing.T) {
				g := newGated(t, state, way.on, way.method)
				defer g.end()
				if way.on == "reclaimer" {
					g.m.Release(g.world.s.Handle())
				}
				err := way.do(g)
				switch verdict := verdictOf(state, way.operation); verdict {
				case "no":
					refusal := refusals[state]
					require.ErrorIs(t, err, refusal.kind)
					require.ErrorContains(t, err, refusal.text)
				case "partly":
					require.ErrorIs(t, err, cuda.ErrInUse)
					require.ErrorContains(t, err, "could not be unmapped after an earlier failure")
				default:
					require.NoError(t, err)
				}
				if way.on == "reclaimer" {
					require.Equal(t, state == "failed", g.b.Stats().Clipped > 0)
				}
			})
		}
	}
}

// Every way in asks the gate, for its operation.
func TestEveryWayAsksTheGate(t *testing.T) {
	for _, way := range ways {
		if way.operation == "" {
			continue
		}
		t.Run(way.on+"."+way.method, func(t *testing.T) {
			g := newGated(t, "active", way.on, way.method)
			defer g.end()
			defer vmm.Refuse(way.operation)()
			if way.on == "reclaimer" {
				g.m.Release(g.world.s.Handle())
			}
			require.ErrorIs(t, way.do(g), cuda.ErrMoved)
		})
	}
}

// refusals are the errors of the states that say no.
var refusals = map[string]struct {
	kind error
	text string
}{
	"moved":      {cuda.ErrMoved, "its successor at"},
	"failed":     {cuda.ErrInUse, "could not be unmapped"},
	"suspending": {cuda.ErrSuspended, "was suspended at"},
	"suspended":  {cuda.ErrSuspended, "was suspended at"},
	"resuming":   {cuda.ErrSuspended, "was suspended at"},
}

func verdictOf(state, operation string) string {
	if operation == "" {
		return "yes"
	}
	return vmm.Verdict(state, operation)
}

// The table of ways has every method of a buffer, and every operation of the gate.
func TestEveryWayInHasARow(t *testing.T) {
	names := func(of reflect.Type) (all []string) {
		for i := range of.NumMethod() {
			all = append(all, of.Method(i).Name)
		}
		return all
	}
	known := map[string][]string{}
	var operations []string
	for _, w := range ways {
		known[w.on] = append(known[w.on], w.method)
		operations = append(operations, w.operation)
	}
	for on, methods := range others {
		known[on] = append(known[on], methods...)
	}
	known["Array"] = append(known["Array"], known["Buffer"]...)
	for on, of := range map[string]reflect.Type{
		"Buffer": reflect.TypeFor[*vmm.Buffer](), "Array": reflect.TypeFor[*vmm.Array[byte]](), "Slice": reflect.TypeFor[vmm.Slice[byte]](),
		"Memory": reflect.TypeFor[share.Memory](), "Hold": reflect.TypeFor[share.Hold](),
	} {
		for _, name := range names(of) {
			require.Contains(t, known[on], name, "%s.%s is no way in: give it a row, and its operation in the gate", on, name)
		}
	}
	for _, name := range vmm.OperationNames {
		require.NotEmpty(t, name)
		require.True(t, slices.Contains(operations, name), "no way in is %s", name)
	}
	for _, name := range vmm.StateNames {
		require.NotEmpty(t, name)
	}
}
