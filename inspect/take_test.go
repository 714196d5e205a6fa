package inspect_test

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

const granule = 2 << 20

// open opens a software machine with two devices, which traces leaks.
func open(t *testing.T) (*sim.Machine, *cuda.System) {
	t.Helper()
	return sim.Open(t, sim.Options{Devices: make([]sim.DeviceOptions, 2)})
}

func closing(t *testing.T, c interface{ Close() error }) {
	t.Helper()
	t.Cleanup(func() { require.NoError(t, c.Close()) })
}

func TestTakeShowsWhatIsThere(t *testing.T) {
	_, sys := open(t)
	d := sys.Devices()[0]
	memory, err := vmm.Create(d, 2*granule, vmm.Properties{})
	require.NoError(t, err)
	closing(t, memory)
	space, err := vmm.Reserve(d, 16*granule, vmm.ReserveOptions{})
	require.NoError(t, err)
	closing(t, space)
	for _, at := range []int{0, 5 * granule} {
		m, err := space.Map(at, memory)
		require.NoError(t, err)
		closing(t, m)
		if at == 0 {
			require.NoError(t, m.SetAccess(vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite},
				vmm.Access{Location: sys.Devices()[1].Location(), Mode: vmm.ReadOnly}))
		}
	}
	buffer, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * granule, Chunks: vmm.FixedChunks(granule), Name: "cache", Tag: "llm"})
	require.NoError(t, err)
	closing(t, buffer)
	_, err = buffer.Append(nil, make([]byte, 2*granule+5))
	require.NoError(t, err)
	stream, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	closing(t, stream)

	s, err := inspect.Take(sys)
	require.NoError(t, err)
	require.Equal(t, inspect.Format, s.Format)
	require.Len(t, s.Devices, 2)
	require.Positive(t, *s.Devices[0].Free)
	require.Nil(t, s.Devices[1].Free, "no context is made to ask")

	require.Len(t, s.Reservations, 2)
	byPtr := map[inspect.Address]inspect.Reservation{}
	for _, r := range s.Reservations {
		byPtr[r.Ptr] = r
	}
	plain := byPtr[inspect.Address(space.Ptr())]
	require.Equal(t, 16*granule, plain.Bytes)
	require.Len(t, plain.Mappings, 2)
	require.Equal(t, plain.Mappings[0].Memory, plain.Mappings[1].Memory, "an alias")
	require.Equal(t, []int{0, 5 * granule}, []int{plain.Mappings[0].Offset, plain.Mappings[1].Offset})
	require.Equal(t, "device 0: read-write, device 1: read-only", plain.Mappings[0].Access)
	require.Empty(t, plain.Mappings[1].Access)
	require.Contains(t, s.Stacks[plain.Stack-1].String(), "TestTakeShowsWhatIsThere")

	require.Len(t, s.Buffers, 1)
	require.Equal(t, inspect.Address(buffer.Ptr()), s.Buffers[0].Ptr)
	require.Equal(t, "cache", s.Buffers[0].Name)
	require.Equal(t, "llm", s.Buffers[0].Tag)
	require.Contains(t, s.Uses(), inspect.Use{Name: "llm", Bytes: 3 * granule, Count: 1})
	require.Equal(t, 2*granule+5, s.Buffers[0].Used)
	require.Equal(t, 3*granule, s.Buffers[0].Committed)
	require.Equal(t, 64*granule, s.Buffers[0].Reserved)
	require.Len(t, byPtr[s.Buffers[0].Ptr].Mappings, 3)

	require.Len(t, s.Memory, 4)
	require.Equal(t, 2, s.Memory[0].Mappings)
	require.Equal(t, "device 0", s.Memory[0].Location)
	require.Equal(t, sys.Stats().Allocations, s.Totals.Allocations)
	kinds := map[string]int{}
	for _, o := range s.Others {
		kinds[o.Kind]++
	}
	require.Positive(t, kinds["stream"])
	require.Zero(t, kinds["mapping"])

	require.NoError(t, memory.Close())
	var text bytes.Buffer
	require.NoError(t, s.Write(&text))
	back, err := inspect.Read(bytes.NewReader(text.Bytes()))
	require.NoError(t, err)
	require.Equal(t, s.Reservations, back.Reservations)
	require.Equal(t, s.Stacks, back.Stacks)
	require.Contains(t, text.String(), `"ptr":"`+space.Ptr().String()+`"`)
}

// A snapshot shows the budgets that the program can reach, and what is suspended is in none.
func TestTakeShowsBudgets(t *testing.T) {
	_, sys := open(t)
	all := cuda.NewBudget(0, cuda.BudgetOptions{})
	limit := cuda.NewBudget(4*granule, cuda.BudgetOptions{Name: "tenant", Parent: all})
	cuda.NewBudget(-1, cuda.BudgetOptions{Name: "invalid"})
	var suspended []vmm.Memory
	for i, name := range []string{"weights", "cache"} {
		b, err := vmm.NewBuffer(sys.Devices()[0], vmm.BufferOptions{Reserve: 64 * granule, Chunks: vmm.FixedChunks(granule), Name: name, Tag: "llm", Budget: limit})
		require.NoError(t, err)
		closing(t, b)
		require.NoError(t, b.Resize(nil, (1+i)*granule))
		suspended = append(suspended, b)
	}
	z, err := vmm.Suspend(t.Context(), vmm.SuspendOptions{}, suspended[1])
	require.NoError(t, err)
	shown := func(s inspect.Snapshot, err error) (own []inspect.Budget) {
		require.NoError(t, err)
		for _, b := range s.Budgets {
			require.NotEqual(t, "invalid", b.Name)
			if b.Peak == 3*granule { // of this test
				own = append(own, b)
			}
		}
		return own
	}
	now := shown(inspect.Take(sys))
	require.Len(t, now, 2)
	uses := []inspect.BudgetUse{{Kind: "buffer", Name: "weights", Tag: "llm", Committed: granule, InUse: granule}}
	require.Equal(t, inspect.Budget{Serial: now[1].Serial, Parent: now[0].Serial, Name: "tenant", Limit: 4 * granule, Committed: granule, Peak: 3 * granule, Owners: uses}, now[1])
	require.Equal(t, inspect.Budget{Serial: now[0].Serial, Committed: granule, Peak: 3 * granule, Owners: uses}, now[0])
	for _, b := range shown(inspect.Summarize(sys)) {
		require.Equal(t, granule, b.Committed)
		require.Empty(t, b.Owners)
	}
	require.NoError(t, z.Resume(t.Context()))
	require.Equal(t, 3*granule, shown(inspect.Take(sys))[0].Committed)
	runtime.KeepAlive(all)
	runtime.KeepAlive(limit)
}

// A snapshot says which memory was suspended, and the totals count it apart.
func TestTakeShowsWhatSleeps(t *testing.T) {
	_, sys := open(t)
	d := sys.Devices()[0]
	var all []*vmm.Buffer
	for range 2 {
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * granule, Chunks: vmm.FixedChunks(granule)})
		require.NoError(t, err)
		closing(t, b)
		require.NoError(t, b.Resize(nil, 2*granule))
		all = append(all, b)
	}
	z, err := vmm.Suspend(t.Context(), vmm.SuspendOptions{}, all[0])
	require.NoError(t, err)
	s, err := inspect.Take(sys)
	require.NoError(t, err)
	for _, r := range s.Reservations {
		require.Len(t, r.Mappings, 2)
		for _, m := range r.Mappings {
			require.Equal(t, r.Ptr == inspect.Address(all[0].Ptr()), m.Suspended)
		}
	}
	away := 0
	for _, m := range s.Memory {
		if m.Suspended {
			away += m.Bytes
		}
	}
	require.Equal(t, 2*granule, away)
	require.Equal(t, 2, s.Totals.Suspended)
	require.Equal(t, 2*granule, s.Totals.SuspendedBytes)
	require.Equal(t, 2*granule, s.Totals.AllocatedBytes)
	require.Equal(t, 2*granule, s.Totals.KeptBytes)
	require.Zero(t, s.Totals.IdleHostBytes)
	require.NoError(t, z.Resume(t.Context()))
	s, err = inspect.Take(sys)
	require.NoError(t, err)
	require.Zero(t, s.Totals.Suspended+s.Totals.KeptBytes)
	require.GreaterOrEqual(t, s.Totals.IdleHostBytes, 2*granule, "it is retained")
	require.Equal(t, s.Totals.IdleHostBytes, sys.TrimHost())
	require.Zero(t, sys.Stats().IdleHostBytes)
	for _, m := range s.Memory {
		require.False(t, m.Suspended)
	}
}

func TestTakeOfNothing(t *testing.T) {
	_, err := inspect.Take(nil)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, "a nil System")
}

// A library in a process whose C library passes no arguments takes snapshots, too.
func TestTakeWithoutArguments(t *testing.T) {
	args := os.Args
	defer func() { os.Args = args }()
	os.Args = nil
	_, sys := open(t)
	s, err := inspect.Take(sys)
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	require.Equal(t, filepath.Base(self), s.Process.Name)
}

func TestTakeShowsPools(t *testing.T) {
	_, sys := open(t)
	d := sys.Devices()[1]
	p, err := pool.New(d, pool.Options{Track: true, Statistics: true})
	require.NoError(t, err)
	closing(t, p)
	stream, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, stream.Close()) })
	p.StartHistory(pool.HistoryOptions{Stacks: true})
	var blocks []pool.Block
	for _, bytes := range []int{100, 3 << 20, 5 << 20} {
		b, err := p.Alloc(pool.Request{Bytes: bytes, Stream: stream, Tag: pool.NewTag("weights")})
		require.NoError(t, err)
		blocks = append(blocks, b)
	}
	require.NoError(t, p.Free(blocks[1]))
	defer func() {
		require.NoError(t, p.Free(blocks[0]))
		require.NoError(t, p.Free(blocks[2]))
	}()

	s, err := inspect.Take(sys)
	require.NoError(t, err)
	require.Len(t, s.Pools, 1)
	got := s.Pools[0]
	require.Equal(t, 1, got.Device)
	require.Equal(t, 2, got.Blocks)
	live := map[int]string{}
	for _, g := range got.Segments {
		end := 0
		for _, b := range g.Blocks {
			require.GreaterOrEqual(t, b.Offset, end)
			end = b.Offset + b.Bytes
			live[b.Requested] = b.Tag
			require.Contains(t, s.Stacks[b.Stack-1].String(), "TestTakeShowsPools")
		}
		require.LessOrEqual(t, end, g.Bytes)
		in := false
		for _, r := range s.Reservations {
			in = in || g.Ptr >= r.Ptr && g.Ptr < r.Ptr+inspect.Address(r.Bytes)
		}
		require.True(t, in, "a segment lies in a reservation")
	}
	require.Equal(t, map[int]string{100: "weights", 5 << 20: "weights"}, live)
	require.Len(t, got.History, 4)
	require.Equal(t, "free", got.History[3].Op)
	require.Positive(t, got.History[3].Stack)
	require.Len(t, got.Streams, 1)

	summary, err := inspect.Summarize(sys)
	require.NoError(t, err)
	require.Equal(t, s.Totals, summary.Totals)
	require.Empty(t, summary.Reservations)
	require.Len(t, summary.Pools, 1)
	require.Empty(t, summary.Pools[0].Segments)
	require.Equal(t, got.Requested, summary.Pools[0].Requested)
	require.Equal(t, 3, summary.Pools[0].Allocs)
	require.Equal(t, []inspect.Use{{Name: "weights", Bytes: 100 + 5<<20, Count: 2}}, summary.Pools[0].Tags)
}

func TestReadRefusesWhatItDoesNotKnow(t *testing.T) {
	const begin = `{"format": "cuvmm snapshot", "version": 2, `
	for _, c := range []struct{ text, want string }{
		{``, "it is cut short"},
		{`{`, "it is cut short: unexpected EOF"},
		{begin + `"reservations": [{"ptr": "0x2000", "bytes": 4096}, {"ptr": "0x1000", "bytes": 1}]}`, "overlaps the one before it"},
		{begin + `"reservations": [{"ptr": "0x1000", "bytes": 4096}, {"ptr": "0x1fff", "bytes": 1}]}`, "overlaps the one before it"},
		{begin + `"reservations": [{"ptr": "0x1000", "bytes": -1}]}`, "the reservation of -1 bytes"},
		{begin + `"reservations": [{"ptr": "0x1000", "bytes": 9223372036854775807}]}`, "too large"},
		{begin + `"reservations": [{"ptr": "0x1000", "bytes": 10, "mappings": [{"offset": 9, "bytes": 2}]}]}`, "the mapping of 2 bytes at offset 9 does not fit"},
		{begin + `"reservations": [{"ptr": "0x1000", "bytes": 10, "mappings": [{"offset": -9, "bytes": 2}]}]}`, "does not fit"},
		{begin + `"buffers": [{"ptr": "0x1000", "used": -5}]}`, "the buffer at 0x1000 uses -5"},
		{begin + `"pools": [{"segments": [{"ptr": "0x1000", "bytes": 10, "blocks": [{"offset": 2, "bytes": 2}, {"offset": 3, "bytes": 2}]}]}]}`, "the block of 2 bytes at offset 3 does not fit"},
		{begin + `"pools": [{"segments": [{"ptr": "0x1000", "bytes": 9223372036854775807, "blocks": [{"offset": 9223372036854775797, "bytes": 5}]}]}]}`, "the segment of 9223372036854775807 bytes"},
		{begin + `"pools": [{"device": 1000000000}]}`, "on device 1000000000"},
		{begin + `"pools": [{"device": -7}]}`, "on device -7"},
		{begin + `"buffers": [{"device": 144115188075855872}]}`, "on device 144115188075855872"},
		{begin + `"buffers": [{"reserved": 9223372036854775807}]}`, "of 9223372036854775807 reserved"},
		{`{}`, `this program reads "cuvmm snapshot", version 2`},
		{`{"format": "cuvmm snapshot", "version": 1}`, "version 1: this program reads"},
		{`{"pools": [{"segments": [{"stream": 5}]}], "format": "cuvmm snapshot", "version": 1}`, "version 1: this program reads"},
		{begin + `"pools": [{"segments": [{"stream": 5}]}]}`, "cannot unmarshal number"},
		{`{"format": "cuvmm snapshot", "version": 2, "reservations": [{"ptr": "zero"}]}`, "an address is hexadecimal"},
	} {
		_, err := inspect.Read(strings.NewReader(c.text))
		require.ErrorContains(t, err, c.want)
	}
}
