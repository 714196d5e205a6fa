package vmm_test

import (
	"bytes"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// model is a buffer beside what it should be: bytes, and the devices that may access them.
//
// Its streams run as late as they like, and are held and released at random.
// So that the outcome is defined each operation on a stream first waits, by an
// event, for the stream that was used before.
type model struct {
	*world
	rt      *rapid.T
	streams []*cuda.Stream
	held    map[*cuda.Stream]bool
	last    *cuda.Stream
	event   *cuda.Event

	buf     *vmm.Buffer
	words   *vmm.Array[uint32]
	at      cuda.Ptr
	data    []byte
	granted vmm.AccessMode // what the peer has
	seed    int
}

func newModel(rt *rapid.T) *model {
	w := newWorld(rt, false)
	m := &model{world: w, rt: rt, held: map[*cuda.Stream]bool{}}
	extra, err := w.d.NewStream(cuda.StreamOptions{})
	require.NoError(rt, err)
	w.own(extra)
	m.streams = []*cuda.Stream{w.s, extra, w.far}
	m.event, err = w.d.NewEvent(cuda.EventOptions{})
	require.NoError(rt, err)
	w.own(m.event)
	m.pinned(4 * kib64)
	m.open()
	return m
}

func (m *model) open() {
	plan := vmm.FixedChunks(rapid.IntRange(1, 2).Draw(m.rt, "chunk") * kib64)
	if rapid.Bool().Draw(m.rt, "geometric") {
		plan = vmm.GeometricChunks(0, 4*kib64)
	}
	b, err := vmm.NewBuffer(m.d, vmm.BufferOptions{Reserve: 16*kib64 - 3, Chunks: plan})
	require.NoError(m.rt, err)
	m.take(b)
	m.data, m.granted = nil, vmm.NoAccess
}

func (m *model) take(b *vmm.Buffer) {
	m.buf, m.words, m.at = b, nil, b.Ptr()
	if b.Len()%4 == 0 {
		words, err := vmm.ArrayOf[uint32](b)
		require.NoError(m.rt, err)
		m.words = words
	}
}

// on chooses where an operation runs: a stream, after all work before, or
// nowhere (nil), with all work before done.
func (m *model) on(need vmm.AccessMode) *cuda.Stream {
	i := rapid.IntRange(-1, len(m.streams)-1).Draw(m.rt, "stream")
	if i < 0 || m.streams[i] == m.far && m.granted < need {
		m.settle()
		return nil
	}
	s := m.streams[i]
	if s != m.last && m.last != nil {
		// An event is of one context; between two devices the host waits.
		if s == m.far || m.last == m.far {
			m.settle()
		} else {
			require.NoError(m.rt, m.event.Record(m.last))
			require.NoError(m.rt, s.Wait(m.event))
		}
	}
	m.last = s
	return s
}

// waits releases the streams before something that waits for them.
func (m *model) waits() {
	for _, s := range m.streams {
		if m.held[s] {
			m.m.Release(s.Handle())
		}
	}
	clear(m.held)
}

// settle waits for all work.
func (m *model) settle() {
	m.waits()
	for _, s := range m.streams {
		require.NoError(m.rt, s.Synchronize())
	}
	m.last = nil
}

func (m *model) bytes(n int) []byte {
	m.seed++
	return pattern(n, m.seed)
}

// length draws lengths that like the edges of chunks.
func (m *model) length(most int, name string) int {
	n := rapid.OneOf(
		rapid.IntRange(0, most),
		rapid.Map(rapid.IntRange(0, most/kib64), func(c int) int { return c * kib64 }),
		rapid.IntRange(0, min(most, 100)),
	).Draw(m.rt, name)
	return n
}

// appended takes the results of an append of p: it returns where p begins.
func (m *model) appended(p []byte) func(at int, err error) {
	return func(at int, err error) {
		m.made(err, p)
		if err == nil {
			require.Equal(m.rt, len(m.data)-len(p), at)
		}
	}
}

// made is what the model does when an operation that adds p returned err.
func (m *model) made(err error, p []byte) {
	if len(m.data)+len(p) > m.buf.Stats().Reserved {
		require.ErrorIs(m.rt, err, cuda.ErrCapacity)
		return
	}
	require.NoError(m.rt, err)
	m.data = append(m.data, p...)
}

// undefined is appended for n bytes that may be anything, but stay what they are.
func (m *model) undefined(n int, at int, err error) {
	p := make([]byte, n)
	if err == nil {
		m.settle()
		now, err := m.m.Bytes(m.at+cuda.Ptr(len(m.data)), n)
		require.NoError(m.rt, err)
		copy(p, now)
	}
	m.appended(p)(at, err)
}

// part draws a part of what is in use.
func (m *model) part() (off, n int) {
	off = rapid.IntRange(0, len(m.data)).Draw(m.rt, "offset")
	return off, m.length(len(m.data)-off, "length")
}

func (m *model) slice(off, n int) vmm.Slice[byte] {
	s, err := m.buf.Slice(off, off+n)
	require.NoError(m.rt, err)
	return s
}

func (m *model) wrote(off int, p []byte) {
	copy(m.data[off:], p)
}

// actions are what a run is made of.
func (m *model) actions() map[string]func(*rapid.T) {
	mayWait := func() { // growth waits for the streams of the chunks that it takes back
		if m.buf.Stats().Clipped > 0 {
			m.waits()
		}
	}
	actions := map[string]func(){
		"append": func() {
			p := m.bytes(m.length(3*kib64, "bytes"))
			mayWait()
			m.appended(p)(m.buf.Append(m.on(vmm.ReadWrite), p))
		},
		"append words": func() {
			if m.words == nil {
				m.take(m.buf)
				if m.words == nil {
					return
				}
			}
			v := make([]uint32, m.length(kib64, "words"))
			var p []byte
			for i := range v {
				v[i] = uint32(i * 77)
				p = append(p, byte(v[i]), byte(v[i]>>8), byte(v[i]>>16), byte(v[i]>>24))
			}
			mayWait()
			at, err := m.words.Append(m.on(vmm.ReadWrite), v)
			if len(m.data)%4 != 0 {
				require.ErrorIs(m.rt, err, cuda.ErrInvalidArgument)
				return
			}
			m.appended(p)(at*4, err)
		},
		"append pinned": func() {
			off := rapid.IntRange(0, m.host.Len()).Draw(m.rt, "from")
			src, err := m.host.Slice(off, m.host.Len())
			require.NoError(m.rt, err)
			mayWait()
			m.appended(src.Bytes())(m.buf.AppendHost(m.on(vmm.ReadWrite), src))
		},
		"append a part of itself": func() {
			off, n := m.part()
			mayWait()
			m.appended(bytes.Clone(m.data[off : off+n]))(m.buf.AppendSlice(m.on(vmm.ReadWrite), m.slice(off, n)))
		},
		"append by address": func() {
			off, n := m.part()
			mayWait()
			m.appended(bytes.Clone(m.data[off : off+n]))(m.buf.AppendPtr(m.on(vmm.ReadWrite), m.at+cuda.Ptr(off), n))
		},
		"append undefined bytes": func() {
			n := m.length(3*kib64, "bytes")
			mayWait()
			at, err := m.buf.AppendUndefined(n)
			m.undefined(n, at, err)
		},
		"grow": func() {
			n := m.length(3*kib64, "bytes")
			mayWait()
			err := m.buf.Grow(n)
			st := m.buf.Stats()
			if len(m.data)+n > st.Reserved {
				require.ErrorIs(m.rt, err, cuda.ErrCapacity)
				return
			}
			require.NoError(m.rt, err)
			require.GreaterOrEqual(m.rt, st.Committed-st.Used, n)
			creations := m.m.Count("cuMemCreate")
			m.appended(make([]byte, n))(len(m.data), m.buf.Resize(m.on(vmm.ReadWrite), len(m.data)+n))
			require.Equal(m.rt, creations, m.m.Count("cuMemCreate"), "there was room")
		},
		"resize": func() {
			n := m.length(8*kib64, "bytes")
			mayWait()
			s := m.on(vmm.ReadWrite)
			if n <= len(m.data) {
				require.NoError(m.rt, m.buf.Resize(s, n))
				m.data = m.data[:n]
				return
			}
			m.made(m.buf.Resize(s, n), make([]byte, n-len(m.data)))
		},
		"clip": func() {
			m.waits()
			require.NoError(m.rt, m.buf.Clip())
			st := m.buf.Stats()
			require.Less(m.rt, st.Committed-st.Used, 4*kib64, "at most a chunk that is not full")
		},
		"clip after": func() {
			// All streams: which of them use the memory is not kept.
			require.NoError(m.rt, m.buf.ClipAfter(m.streams...))
		},
		"drain": func() {
			m.waits()
			require.NoError(m.rt, m.drain())
			require.Zero(m.rt, m.buf.Stats().Clipped)
		},
		"write a part": func() {
			off, n := m.part()
			p := m.bytes(n)
			mayWait()
			require.NoError(m.rt, m.slice(off, n).CopyFrom(m.on(vmm.ReadWrite), p))
			m.wrote(off, p)
		},
		"write a part from pinned memory": func() {
			off, n := m.part()
			n = min(n, m.host.Len())
			src, err := m.host.Slice(0, n)
			require.NoError(m.rt, err)
			mayWait()
			require.NoError(m.rt, m.slice(off, n).CopyFromHost(m.on(vmm.ReadWrite), src))
			m.wrote(off, src.Bytes())
		},
		"zero a part": func() {
			off, n := m.part()
			mayWait()
			require.NoError(m.rt, m.slice(off, n).Zero(m.on(vmm.ReadWrite)))
			m.wrote(off, make([]byte, n))
		},
		"copy a part": func() {
			half := len(m.data) / 2
			n := m.length(half, "length")
			mayWait()
			require.NoError(m.rt, m.slice(half, n).CopyFromSlice(m.on(vmm.ReadWrite), m.slice(0, n)))
			copy(m.data[half:half+n], m.data[:n])
		},
		"read a part": func() {
			off, n := m.part()
			got := make([]byte, n)
			m.waits()
			require.NoError(m.rt, m.slice(off, n).CopyTo(m.on(vmm.ReadOnly), got))
			require.True(m.rt, bytes.Equal(m.data[off:off+n], got))
		},
		"hold a stream": func() {
			s := rapid.SampledFrom(m.streams).Draw(m.rt, "held")
			m.m.Hold(s.Handle())
			m.held[s] = true
		},
		"release the streams": m.waits,
		"grant or revoke": func() {
			mode := rapid.SampledFrom([]vmm.AccessMode{vmm.NoAccess, vmm.ReadOnly, vmm.ReadWrite}).Draw(m.rt, "mode")
			m.waits()
			require.NoError(m.rt, m.buf.SetAccess(vmm.Access{Location: m.peer.Location(), Mode: mode}))
			m.granted = mode
		},
		"move": func() {
			m.settle()
			require.NoError(m.rt, m.drain())
			committed := m.buf.Stats().Committed
			reserve := rapid.IntRange(committed+1, max(committed+1, 32*kib64)).Draw(m.rt, "range")
			old := m.buf
			b, err := old.Move(vmm.MoveOptions{Reserve: reserve})
			require.NoError(m.rt, err)
			require.NotEqual(m.rt, old.Ptr(), b.Ptr())
			m.take(b)
			require.NoError(m.rt, old.Close())
		},
		"close after and begin anew": func() {
			require.NoError(m.rt, m.buf.CloseAfter(m.streams...))
			require.ErrorIs(m.rt, m.buf.Grow(1), cuda.ErrClosed)
			m.open()
		},
		"close and begin anew": func() {
			m.waits()
			require.NoError(m.rt, m.buf.Close())
			m.open()
		},
		"fail": func() { m.fail() },
	}
	all := map[string]func(*rapid.T){"": func(rt *rapid.T) { m.rt, m.t = rt, rt; m.check() }}
	for name, action := range actions {
		all[name] = func(rt *rapid.T) { m.rt = rt; action() }
	}
	return all
}

// fail has an operation fail at a driver call: the model is as it was, but for
// what a failed clip took out of use, which the next Clip gives back.
func (m *model) fail() {
	m.settle()
	require.NoError(m.rt, m.drain())
	call := rapid.SampledFrom([]string{"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemcpyHtoDAsync"}).Draw(m.rt, "call")
	f := sim.Fault{Call: call, After: rapid.IntRange(0, 2).Draw(m.rt, "after"), Result: cuda.Code(driver.Unknown)}
	if call == "cuMemSetAccess" || call == "cuMemUnmap" {
		f.Parts = rapid.IntRange(0, 3).Draw(m.rt, "parts")
	}
	remove := m.m.Inject(f)
	defer remove()
	before := m.buf.Stats()
	unchanged := func() {
		m.waits()
		require.Equal(m.rt, before, m.buf.Stats())
	}
	switch rapid.IntRange(0, 3).Draw(m.rt, "what fails") {
	case 0:
		p := m.bytes(m.length(4*kib64, "bytes"))
		if at, err := m.buf.Append(nil, p); err != nil {
			unchanged()
		} else {
			m.appended(p)(at, nil)
		}
	case 1:
		n := m.length(4*kib64, "bytes")
		if at, err := m.buf.AppendUndefined(n); err != nil {
			unchanged()
		} else {
			m.undefined(n, at, nil)
		}
	case 2:
		mode := rapid.SampledFrom([]vmm.AccessMode{vmm.NoAccess, vmm.ReadWrite}).Draw(m.rt, "mode")
		if err := m.buf.SetAccess(vmm.Access{Location: m.peer.Location(), Mode: mode}); err != nil {
			unchanged()
		} else {
			m.granted = mode
		}
	case 3:
		if err := m.buf.Clip(); err != nil {
			remove()
			require.NoError(m.rt, m.buf.Clip())
		}
		require.Zero(m.rt, m.buf.Stats().Clipped)
	}
}

// check holds after every step.
func (m *model) check() {
	pending := m.sys.Stats().Pending // and nothing moves by itself where there is none
	st := m.buf.Stats()
	require.Equal(m.rt, m.at, m.buf.Ptr())
	require.Equal(m.rt, len(m.data), st.Used)
	require.Equal(m.rt, len(m.data), m.buf.Len())
	if m.words != nil {
		require.Equal(m.rt, len(m.data)/4, m.words.Len())
	}
	require.LessOrEqual(m.rt, st.Used, st.Committed)
	require.LessOrEqual(m.rt, st.Committed+st.Clipped, st.Reserved)
	require.Zero(m.rt, st.Committed%kib64)
	require.GreaterOrEqual(m.rt, st.Committed, st.Chunks*kib64)
	if len(m.held) > 0 {
		return // the bytes are not there yet
	}
	for _, s := range m.streams {
		require.NoError(m.rt, s.Synchronize())
	}
	require.Empty(m.rt, m.m.Fault())
	got, err := m.m.Bytes(m.at, len(m.data))
	require.NoError(m.rt, err)
	require.True(m.rt, bytes.Equal(m.data, got))
	if pending > 0 {
		return
	}
	// With nothing pending all memory is the buffer's, but for less than a
	// granule for each context.
	free, total := m.m.Memory(0)
	require.Equal(m.rt, st.Committed+st.Clipped, int(total-free)/kib64*kib64, "%+v", m.sys.Stats())
	require.Equal(m.rt, st.Committed+st.Clipped, m.sys.Stats().MappedBytes)
}

func TestABufferIsAGrowingSliceOfBytes(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := newModel(rt)
		defer func() {
			if rt.Failed() {
				return
			}
			m.waits()
			require.NoError(rt, m.buf.Close())
			m.end()
		}()
		rt.Repeat(m.actions())
	})
}
