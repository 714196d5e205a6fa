package vmm_test

import (
	"bytes"
	"context"
	"slices"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// piece is a chunk of the model: what its bytes are, and whether it has memory.
type piece struct {
	data    []byte
	present bool
	known   bool // false once its bytes were dropped
}

// twin is a buffer and what the model knows of it.
type twin struct {
	b      *vmm.Buffer
	pieces []*piece
	used   int
	moved  bool
	sleep  *vmm.Suspension // nil while awake
	kept   bool            // by that
}

// families is the model: buffers that share pieces, some asleep.
type families struct {
	*world
	rt    *rapid.T
	all   []*twin
	fresh byte
}

// nothing is what an action panics with that finds nothing to do.
type nothing struct{}

const mostTwins = 6

func (f *families) room() {
	if len(f.all) == mostTwins {
		panic(nothing{})
	}
}

func (f *families) pick(which func(*twin) bool) *twin {
	var some []*twin
	for _, w := range f.all {
		if which(w) {
			some = append(some, w)
		}
	}
	if len(some) == 0 {
		panic(nothing{})
	}
	return rapid.SampledFrom(some).Draw(f.rt, "buffer")
}

func anyTwin(*twin) bool      { return true }
func awake(w *twin) bool      { return w.sleep == nil }
func changeable(w *twin) bool { return !w.moved }

// owners returns the buffers that have a piece.
func (f *families) owners(p *piece) (all []*twin) {
	for _, w := range f.all {
		if slices.Contains(w.pieces, p) {
			all = append(all, w)
		}
	}
	return all
}

// refused checks the error of an operation that needs the memory of a buffer.
func (f *families) refused(w *twin, err error) bool {
	if w.sleep != nil {
		require.ErrorIs(f.rt, err, cuda.ErrSuspended)
		return true
	}
	require.NoError(f.rt, err)
	return false
}

func (f *families) bytes(n int) []byte {
	f.fresh++
	return bytes.Repeat([]byte{f.fresh}, n)
}

// longer is the model's append.
func (w *twin) longer(data []byte) {
	for _, b := range data {
		if w.used == len(w.pieces)*kib64 {
			w.pieces = append(w.pieces, &piece{data: make([]byte, kib64), present: true, known: true})
		}
		w.pieces[w.used/kib64].data[w.used%kib64] = b
		w.used++
	}
}

func (w *twin) clip() { w.pieces = w.pieces[:(w.used+kib64-1)/kib64] }

func (f *families) add(b *vmm.Buffer, pieces []*piece, used int) *twin {
	w := &twin{b: b, pieces: pieces, used: used}
	f.all = append(f.all, w)
	return w
}

// suspend suspends buffers that are awake, and returns the model's memory that went.
func (f *families) suspend(named []*twin, o vmm.SuspendOptions, do func(m []vmm.Memory) (*vmm.Suspension, error)) {
	var memory []vmm.Memory
	for _, w := range named {
		memory = append(memory, w.b)
	}
	preview, err := vmm.Preview(o, memory...)
	require.NoError(f.rt, err)
	s, err := do(memory)
	require.NoError(f.rt, err)
	require.NoError(f.rt, s.Released().Wait(f.ctx()))
	given, asked := 0, map[*piece]bool{}
	for _, w := range named {
		w.sleep, w.kept = s, o.Keep == vmm.KeepHost
		for _, p := range w.pieces {
			if asked[p] {
				continue
			}
			asked[p] = true
			if !slices.ContainsFunc(f.owners(p), func(o *twin) bool { return !slices.Contains(named, o) }) {
				p.present = false
				p.known = p.known && w.kept
				given += kib64
			}
		}
	}
	r := s.Report()
	require.Equal(f.rt, given, r.Given)
	require.Equal(f.rt, len(asked)*kib64, r.Asked)
	require.Equal(f.rt, r.Given, preview.Given)
	require.Equal(f.rt, r.Held, preview.Held)
}

// check compares everything with the model.
func (f *families) check() {
	held := map[*piece]bool{}
	for _, w := range f.all {
		st := w.b.Stats()
		require.Equal(f.rt, w.used, st.Used)
		require.Equal(f.rt, len(w.pieces)*kib64, st.Committed)
		for i, p := range w.pieces {
			if p.present {
				held[p] = true
			}
			if w.sleep != nil {
				continue
			}
			require.True(f.rt, p.present, "a piece of a buffer that is awake is away")
			if n := min(kib64, w.used-i*kib64); n > 0 && p.known {
				got, err := f.m.Bytes(w.b.Ptr()+cuda.Ptr(i*kib64), n)
				require.NoError(f.rt, err)
				require.True(f.rt, bytes.Equal(p.data[:n], got), "bytes of piece %d", i)
			}
		}
		if w.sleep == nil {
			require.Zero(f.rt, st.Suspended)
		}
	}
	_, total := f.m.Memory(0)
	require.Equal(f.rt, total/kib64-len(held), f.free(0), "memory that is in use")
	require.Empty(f.rt, f.m.Fault())
}

func (f *families) subset(of func(*twin) bool) []*twin {
	var some []*twin
	for _, w := range f.all {
		if of(w) {
			some = append(some, w)
		}
	}
	if len(some) == 0 {
		panic(nothing{})
	}
	return rapid.SliceOfNDistinct(rapid.SampledFrom(some), 1, len(some), func(w *twin) *twin { return w }).Draw(f.rt, "some")
}

func (f *families) remove(w *twin) {
	f.all = slices.DeleteFunc(f.all, func(o *twin) bool { return o == w })
}

// Whatever is suspended, resumed, changed and closed, in whatever order, awake buffers have the
// bytes of the model, memory is in use for what is awake alone, and what sleeps refuses what
// needs its memory.
func TestSuspendedFamiliesLikeAModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		f := &families{world: newWorld(rt, false), rt: rt}
		size := rapid.IntRange(1, 3*kib64)
		actions := map[string]func(){
			"new": func() {
				f.room()
				b, err := vmm.NewBuffer(f.d, vmm.BufferOptions{Reserve: 32 * kib64, Chunks: vmm.FixedChunks(kib64)})
				require.NoError(f.rt, err)
				data := f.bytes(size.Draw(f.rt, "bytes"))
				require.NoError(f.rt, gputest.Err(b.Append(nil, data)))
				f.add(b, nil, 0).longer(data)
			},
			"append": func() {
				w := f.pick(changeable)
				data := f.bytes(size.Draw(f.rt, "bytes"))
				if w.used+len(data) > 20*kib64 {
					panic(nothing{})
				}
				if err := gputest.Err(w.b.Append(f.s, data)); !f.refused(w, err) {
					w.longer(data)
					require.NoError(f.rt, f.s.Synchronize())
				}
			},
			"shorter": func() {
				w := f.pick(changeable)
				n := rapid.IntRange(0, w.used).Draw(f.rt, "length")
				shared := false
				for _, p := range w.pieces[n/kib64:] {
					shared = shared || len(f.owners(p)) > 1
				}
				err := w.b.Resize(nil, n)
				if err != nil {
					require.ErrorIs(f.rt, err, cuda.ErrInUse)
					require.True(f.rt, shared, "no other buffer has what goes")
					return
				}
				w.used = n
			},
			"clip": func() {
				w := f.pick(changeable)
				require.NoError(f.rt, w.b.Clip())
				w.clip()
			},
			"clip after": func() {
				w := f.pick(changeable)
				require.NoError(f.rt, w.b.ClipAfter(f.s))
				require.NoError(f.rt, f.drain())
				w.clip()
			},
			"fork": func() {
				w := f.pick(changeable)
				f.room()
				n := rapid.IntRange(0, w.used).Draw(f.rt, "prefix")
				b, err := w.b.Fork(nil, n, vmm.ForkOptions{})
				if f.refused(w, err) {
					return
				}
				fork := f.add(b, slices.Clone(w.pieces[:n/kib64]), n/kib64*kib64)
				if rest := n % kib64; rest > 0 {
					from := w.pieces[n/kib64]
					fork.longer(from.data[:rest])
					fork.pieces[n/kib64].known = from.known
				}
			},
			"move": func() {
				w := f.pick(changeable)
				f.room()
				b, err := w.b.Move(vmm.MoveOptions{Reserve: 32 * kib64})
				if !f.refused(w, err) {
					w.moved = true
					f.add(b, slices.Clone(w.pieces), w.used)
				}
			},
			"zero": func() {
				w := f.pick(func(w *twin) bool { return w.used > 0 })
				i := rapid.IntRange(0, (w.used-1)/kib64).Draw(f.rt, "piece")
				n := min(kib64, w.used-i*kib64)
				part, err := w.b.Slice(i*kib64, i*kib64+n)
				require.NoError(f.rt, err)
				if err := part.Zero(nil); !f.refused(w, err) {
					clear(w.pieces[i].data[:n])
				}
			},
			"access": func() {
				w := f.pick(anyTwin)
				mode := rapid.SampledFrom([]vmm.AccessMode{vmm.NoAccess, vmm.ReadOnly}).Draw(f.rt, "mode")
				err := w.b.SetAccess(vmm.Access{Location: f.peer.Location(), Mode: mode})
				if w.sleep == nil || err != nil {
					f.refused(w, err)
				}
			},
			"suspend": func() {
				named := f.subset(awake)
				o := vmm.SuspendOptions{Keep: rapid.SampledFrom([]vmm.Keep{vmm.KeepHost, vmm.KeepHost, vmm.Drop}).Draw(f.rt, "keep")}
				f.suspend(named, o, func(m []vmm.Memory) (*vmm.Suspension, error) { return vmm.Suspend(f.ctx(), o, m...) })
			},
			"suspend after": func() {
				named := f.subset(awake)
				f.suspend(named, vmm.SuspendOptions{}, func(m []vmm.Memory) (*vmm.Suspension, error) {
					return vmm.SuspendAfter(vmm.SuspendOptions{}, []*cuda.Stream{f.s}, m...)
				})
			},
			"suspend what sleeps": func() {
				w := f.pick(func(w *twin) bool { return w.sleep != nil })
				_, err := vmm.Suspend(f.ctx(), vmm.SuspendOptions{}, w.b)
				require.ErrorIs(f.rt, err, cuda.ErrSuspended)
			},
			"suspend in vain": func() {
				ctx, cancel := context.WithCancel(f.ctx())
				cancel()
				w := f.pick(func(w *twin) bool { return w.sleep == nil && len(w.pieces) > 0 && len(f.owners(w.pieces[0])) == 1 })
				_, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, w.b)
				require.ErrorIs(f.rt, err, context.Canceled)
			},
			"resume": func() {
				s := f.pick(func(w *twin) bool { return w.sleep != nil }).sleep
				named := f.subset(func(w *twin) bool { return w.sleep == s })
				var memory []vmm.Memory
				if rapid.Bool().Draw(f.rt, "all") {
					named = nil
					for _, w := range f.all {
						if w.sleep == s {
							named = append(named, w)
						}
					}
				} else {
					for _, w := range named {
						memory = append(memory, w.b)
					}
				}
				require.NoError(f.rt, s.Resume(f.ctx(), memory...))
				for _, w := range named {
					w.sleep = nil
					for _, p := range w.pieces {
						p.present = true
					}
				}
			},
			"forget": func() {
				s := f.pick(func(w *twin) bool { return w.sleep != nil }).sleep
				named := f.subset(func(w *twin) bool { return w.sleep == s })
				var memory []vmm.Memory
				for _, w := range named {
					memory = append(memory, w.b)
				}
				require.NoError(f.rt, s.Forget(f.ctx(), memory...))
				for _, w := range named {
					for _, p := range w.pieces {
						others := slices.ContainsFunc(f.owners(p), func(o *twin) bool { return !slices.Contains(named, o) })
						p.known = p.known && (p.present || others)
					}
				}
			},
			"close": func() {
				w := f.pick(anyTwin)
				if rapid.Bool().Draw(f.rt, "after") {
					require.NoError(f.rt, w.b.CloseAfter(f.s))
					require.NoError(f.rt, f.drain())
				} else {
					require.NoError(f.rt, w.b.Close())
				}
				f.remove(w)
			},
		}
		steps := map[string]func(*rapid.T){}
		for name, do := range actions {
			steps[name] = func(inner *rapid.T) {
				defer func() {
					if r := recover(); r != nil && r != any(nothing{}) {
						panic(r)
					}
				}()
				f.rt, f.world.t = inner, inner
				do()
			}
		}
		steps[""] = func(inner *rapid.T) {
			f.rt, f.world.t = inner, inner
			f.check()
		}
		rt.Repeat(steps)
		f.rt, f.world.t = rt, rt
		for _, w := range f.all {
			require.NoError(f.rt, w.b.Close())
		}
		f.end()
	})
}
