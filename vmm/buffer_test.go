package vmm_test

import (
	"bytes"
	"context"
	"io"
	"math"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func TestBufferGrowsAtOneAddress(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{})
		require.NoError(t, err)
		closed(t, b)
		s := stream(t, d)
		at := b.Ptr()
		var want []byte
		for i := range 20 {
			piece := pattern(1+i*700_001, i)
			require.NoError(t, gputest.Err(b.Append(s, piece)))
			want = append(want, piece...)
			require.Equal(t, at, b.Ptr())
		}
		require.Equal(t, len(want), b.Len())
		require.NoError(t, s.Synchronize())
		got, err := io.ReadAll(vmm.NewReader(b))
		require.NoError(t, err)
		require.True(t, bytes.Equal(want, got))
		st := b.Stats()
		require.Equal(t, (d.TotalMemory()+2*mib-1)/(2*mib)*2*mib, st.Reserved, "the default range is the device's memory")
		require.GreaterOrEqual(t, st.Committed, st.Used)
		require.Zero(t, st.Committed%(2*mib))
	})
}

func TestAppendFromEverySource(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib})
		require.NoError(t, err)
		closed(t, b)
		s := stream(t, d)
		host, err := d.NewHostBuffer(3 * mib)
		require.NoError(t, err)
		closed(t, host)
		copy(host.Bytes(), pattern(3*mib, 1))
		for _, on := range []*cuda.Stream{s, nil} {
			before := b.Len()
			require.NoError(t, gputest.Err(b.Append(on, pattern(100, 2))))
			require.NoError(t, gputest.Err(b.AppendHost(on, host.All())))
			require.NoError(t, s.Synchronize())
			self, err := b.Slice(before, before+50)
			require.NoError(t, err)
			require.NoError(t, gputest.Err(b.AppendSlice(on, self)))
			require.NoError(t, gputest.Err(b.AppendPtr(on, self.Ptr(), self.Size())))
			require.NoError(t, s.Synchronize())
			want := append(append(pattern(100, 2), pattern(3*mib, 1)...), append(pattern(50, 2), pattern(50, 2)...)...)
			part, err := b.Slice(before, before+len(want))
			require.NoError(t, err)
			got := make([]byte, len(want))
			require.NoError(t, part.CopyTo(nil, got))
			require.True(t, bytes.Equal(want, got))
		}
	})
}

// Under a held stream Append returns and no byte has landed.
func TestAppendIsWorkOnTheStream(t *testing.T) {
	m, d := open(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{})
	require.NoError(t, err)
	closed(t, b)
	s := stream(t, d)
	m.Hold(s.Handle())
	src := pattern(1000, 3)
	require.NoError(t, gputest.Err(b.Append(s, src)))
	want := bytes.Clone(src)
	clear(src) // it was staged
	time.Sleep(5 * time.Millisecond)
	got, err := m.Bytes(b.Ptr(), 1000)
	require.NoError(t, err)
	require.Equal(t, make([]byte, 1000), got)
	m.Release(s.Handle())
	require.NoError(t, s.Synchronize())
	got, err = m.Bytes(b.Ptr(), 1000)
	require.NoError(t, err)
	require.Equal(t, want, got)
}

func TestCloseAfterReturnsAtOnceAndKeepsTheMemoryUntilTheStreamHasPassed(t *testing.T) {
	m, d := open(t)
	free, _ := m.Memory(0)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{})
	require.NoError(t, err)
	s := stream(t, d)
	require.NoError(t, gputest.Err(b.AppendUndefined(32*mib)))
	m.Hold(s.Handle())
	require.NoError(t, gputest.Err(b.Append(s, pattern(mib, 1))))
	require.NoError(t, b.CloseAfter(s))
	require.ErrorIs(t, gputest.Err(b.Append(s, []byte{1})), cuda.ErrClosed)
	require.NoError(t, b.Close(), "closing again does nothing")
	require.Equal(t, 1, d.System().Stats().Pending)

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, d.System().Drain(ctx), context.DeadlineExceeded)
	now, _ := m.Memory(0)
	require.LessOrEqual(t, now, free-32*mib)

	m.Release(s.Handle())
	require.NoError(t, d.System().Drain(t.Context()))
	now, _ = m.Memory(0)
	require.Equal(t, free, now+contextBlock(t, m, free, now))
	require.Zero(t, d.System().Stats().Reservations)
}

// contextBlock is what the device's context keeps to wait by: it is the only
// memory that may be left.
func contextBlock(t *testing.T, m *sim.Machine, free, now int) int {
	t.Helper()
	require.LessOrEqual(t, free-now, 2*mib)
	return free - now
}

func TestCloseAfterWithoutStreamsIsRefused(t *testing.T) {
	_, d := open(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{})
	require.NoError(t, err)
	closed(t, b)
	require.ErrorIs(t, b.CloseAfter(), cuda.ErrInvalidArgument)
	require.ErrorIs(t, b.CloseAfter(nil), cuda.ErrInvalidArgument)
	require.NoError(t, gputest.Err(b.Append(nil, []byte{1})), "nothing has changed")
}

func TestResizeGrowsWithZerosAndShrinks(t *testing.T) {
	m, d := open(t, sim.Options{Poison: true})
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	require.NoError(t, err)
	closed(t, b)
	require.NoError(t, gputest.Err(b.Append(nil, pattern(5*mib, 1))))
	require.NoError(t, b.Resize(nil, 100))
	require.Equal(t, 100, b.Len())
	require.Equal(t, 6*mib, b.Stats().Committed, "the memory stays until Clip")
	require.NoError(t, b.Resize(nil, 9*mib))
	got, err := m.Bytes(b.Ptr(), 9*mib)
	require.NoError(t, err)
	require.True(t, bytes.Equal(append(pattern(100, 1), make([]byte, 9*mib-100)...), got))
}

func TestClipLeavesAtMostOneChunkThatIsNotFull(t *testing.T) {
	m, d := open(t)
	free, _ := m.Memory(0)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Chunks: vmm.FixedChunks(4 * mib)})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.AppendUndefined(40*mib)))
	require.Equal(t, 10, b.Stats().Chunks)
	require.NoError(t, b.Resize(nil, 9*mib))
	require.NoError(t, b.Clip())
	require.Equal(t, vmm.BufferStats{Reserved: d.TotalMemory(), Committed: 12 * mib, Used: 9 * mib, Chunks: 3, Grown: 1}, b.Stats())
	require.NoError(t, b.Clip(), "again does nothing")
	require.NoError(t, gputest.Err(b.AppendUndefined(8*mib)))
	require.Equal(t, 20*mib, b.Stats().Committed)
	require.NoError(t, b.Resize(nil, 0))
	require.NoError(t, b.Clip())
	require.Zero(t, b.Stats().Chunks)
	require.NoError(t, b.Close())
	now, _ := m.Memory(0)
	contextBlock(t, m, free, now)
}

func TestGeometricChunksDoubleUpToTheCap(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Chunks: vmm.GeometricChunks(0, 8*mib)})
		require.NoError(t, err)
		closed(t, b)
		var committed []int
		for range 7 {
			require.NoError(t, gputest.Err(b.AppendUndefined(b.Stats().Committed-b.Len()+1)))
			committed = append(committed, b.Stats().Committed/mib)
		}
		require.Equal(t, []int{2, 4, 8, 16, 24, 32, 40}, committed)
	})
}

func TestBeyondTheRangeIsErrCapacityAndMoveGoesOn(t *testing.T) {
	m, d := open(t)
	old, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 4*mib - 5})
	require.NoError(t, err)
	closed(t, old)
	require.NoError(t, gputest.Err(old.Append(nil, pattern(4*mib, 1))))
	_, err = old.Append(nil, []byte{1, 2, 3})
	require.ErrorIs(t, err, cuda.ErrCapacity)
	require.ErrorContains(t, err, "3 more bytes, with 4194304 used of 4194304 reserved")
	require.Equal(t, 4*mib, old.Len())

	_, err = old.Move(vmm.MoveOptions{Reserve: 2 * mib})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	before, _ := m.Memory(0)
	b, err := old.Move(vmm.MoveOptions{Reserve: 64 * mib})
	require.NoError(t, err)
	after, _ := m.Memory(0)
	require.Equal(t, before, after, "nothing was copied")
	closed(t, b)
	require.NotEqual(t, old.Ptr(), b.Ptr())
	require.NoError(t, gputest.Err(b.Append(nil, []byte{1, 2, 3})))
	require.Equal(t, 4*mib, old.Len())
	first, err := old.Slice(0, 4)
	require.NoError(t, err)
	require.NoError(t, first.CopyFrom(nil, []byte("both")))
	got, err := m.Bytes(b.Ptr(), 4)
	require.NoError(t, err)
	require.Equal(t, "both", string(got), "the same memory at both addresses")
}

func TestBadInputIsATypedErrorAndChangesNothing(t *testing.T) {
	m, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{}, {Unreachable: []int{0}}}})
	_, other := open(t)
	foreign := stream(t, other)
	far, err := d.System().Device(1)
	require.NoError(t, err)
	farStream := stream(t, far)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib})
	require.NoError(t, err)
	closed(t, b)
	require.NoError(t, gputest.Err(b.Append(nil, pattern(1000, 1))))
	short, err := b.Slice(900, 1000)
	require.NoError(t, err)
	a, err := vmm.Create(d, 2*mib, vmm.Properties{})
	require.NoError(t, err)
	closed(t, a)
	gone, err := vmm.Create(d, 2*mib, vmm.Properties{})
	require.NoError(t, err)
	require.NoError(t, gone.Close())
	foreignMemory, err := vmm.Create(other, 2*mib, vmm.Properties{})
	require.NoError(t, err)
	closed(t, foreignMemory)
	r, err := vmm.Reserve(d, 8*mib, vmm.ReserveOptions{})
	require.NoError(t, err)
	closed(t, r)
	mapping, err := r.Map(2*mib, a)
	require.NoError(t, err)
	closed(t, mapping)
	free, _ := m.Memory(0)
	live := d.System().Live()

	create := func(size int, p vmm.Properties) error { _, err := vmm.Create(d, size, p); return err }
	newBuffer := func(o vmm.BufferOptions) error { _, err := vmm.NewBuffer(d, o); return err }
	reserve := func(size int, o vmm.ReserveOptions) error { _, err := vmm.Reserve(d, size, o); return err }
	mapAt := func(off int, p vmm.Physical) error { _, err := r.Map(off, p); return err }
	cut := func(from, to int) error { _, err := b.Slice(from, to); return err }
	for _, row := range []struct {
		what string
		err  error
		is   error
		says string
	}{
		{"create nothing", create(0, vmm.Properties{}), cuda.ErrInvalidArgument, "a size of 0 bytes"},
		{"create less than nothing", create(-2*mib, vmm.Properties{}), cuda.ErrInvalidArgument, "-2097152"},
		{"create misaligned", create(3*mib, vmm.Properties{}), cuda.ErrInvalidArgument, "2 MiB: 4 MiB"},
		{"create absurdly", create(math.MaxInt, vmm.Properties{}), cuda.ErrInvalidArgument, "ask for less"},
		{"create too much", create(1<<40, vmm.Properties{}), cuda.ErrOutOfMemory, "1 TiB on device 0, with"},
		{"create on no device", create(2*mib, vmm.Properties{Location: cuda.OnDevice(7)}), cuda.ErrInvalidArgument, "device 7 of 2"},
		{"create on a negative device", create(2*mib, vmm.Properties{Location: cuda.OnDevice(-1)}), cuda.ErrInvalidArgument, "device -1"},
		{"create on a negative node", create(2*mib, vmm.Properties{Location: cuda.OnHostNUMA(-1)}), cuda.ErrInvalidArgument, "numbered from 0"},
		{"create on a node beyond the driver's numbers", create(2*mib, vmm.Properties{Location: cuda.OnHostNUMA(1 << 32)}), cuda.ErrInvalidArgument, "nodes are numbered from 0"},
		{"create on a node that does not exist", create(2*mib, vmm.Properties{Location: cuda.OnHostNUMA(1 << 20)}), cuda.ErrInvalidArgument, "numactl -H"},
		{"create on another host", create(2*mib, vmm.Properties{Location: cuda.Location{Type: cuda.LocationHost, ID: 5}}), cuda.ErrInvalidArgument, "the host has no ID"},
		{"create on the current node", create(2*mib, vmm.Properties{Location: cuda.Location{Type: cuda.LocationHostNUMACurrent}}), cuda.ErrInvalidArgument, "OnHostNUMA"},
		{"create somewhere", create(2*mib, vmm.Properties{Location: cuda.Location{Type: 77}}), cuda.ErrInvalidArgument, "LocationType(77)"},
		{"create shareable host memory", create(2*mib, vmm.Properties{Location: cuda.OnHost(), Handles: vmm.PosixFD}), cuda.ErrNotSupported, "NUMA"},
		{"create with odd handle types", create(2*mib, vmm.Properties{Handles: 64}), cuda.ErrInvalidArgument, "0x40"},
		{"create with fabric without a channel", create(2*mib, vmm.Properties{Handles: vmm.Fabric}), cuda.ErrNotPermitted, "IMEX"},
		{"create compressible host memory", create(2*mib, vmm.Properties{Location: cuda.OnHost(), Compressible: true}), cuda.ErrInvalidArgument, "device memory"},
		{"create for no usage", create(2*mib, vmm.Properties{Usage: 9}), cuda.ErrInvalidArgument, "Usage(9)"},
		{"a nil device", func() error { _, err := vmm.NewBuffer(nil, vmm.BufferOptions{}); return err }(), cuda.ErrInvalidArgument, "nil device"},
		{"reserve nothing", reserve(0, vmm.ReserveOptions{}), cuda.ErrInvalidArgument, "0 bytes"},
		{"reserve misaligned", reserve(4096, vmm.ReserveOptions{}), cuda.ErrInvalidArgument, "multiple"},
		{"reserve at odd alignment", reserve(2*mib, vmm.ReserveOptions{Align: 3}), cuda.ErrInvalidArgument, "power of two"},
		{"reserve at negative alignment", reserve(2*mib, vmm.ReserveOptions{Align: math.MinInt}), cuda.ErrInvalidArgument, "power of two"},
		{"reserve more than there is", reserve(1<<47, vmm.ReserveOptions{}), cuda.ErrOutOfAddressSpace, "128 TiB"},
		{"buffer over more than there is", newBuffer(vmm.BufferOptions{Reserve: 1 << 47}), cuda.ErrOutOfAddressSpace, "128 TiB"},
		{"buffer of negative range", newBuffer(vmm.BufferOptions{Reserve: -1}), cuda.ErrInvalidArgument, "-1"},
		{"buffer of absurd range", newBuffer(vmm.BufferOptions{Reserve: math.MaxInt}), cuda.ErrInvalidArgument, "at most"},
		{"buffer with misaligned chunks", newBuffer(vmm.BufferOptions{Chunks: vmm.FixedChunks(3 * mib)}), cuda.ErrInvalidArgument, "granularity"},
		{"buffer with negative chunks", newBuffer(vmm.BufferOptions{Chunks: vmm.FixedChunks(-2 * mib)}), cuda.ErrInvalidArgument, "positive"},
		{"buffer with cap under floor", newBuffer(vmm.BufferOptions{Chunks: vmm.GeometricChunks(4*mib, 2*mib)}), cuda.ErrInvalidArgument, "not below"},
		{"buffer for an unreachable device", newBuffer(vmm.BufferOptions{Access: []vmm.Access{{Location: far.Location(), Mode: vmm.ReadWrite}}}), cuda.ErrNotSupported, "no peer access"},
		{"chunks of nothing", newBuffer(vmm.BufferOptions{Chunks: vmm.FixedChunks(0)}), cuda.ErrInvalidArgument, "positive multiples of the granularity"},
		{"chunks of at most nothing", newBuffer(vmm.BufferOptions{Chunks: vmm.GeometricChunks(0, 0)}), cuda.ErrInvalidArgument, "positive multiples of the granularity"},
		{"buffer for the host", newBuffer(vmm.BufferOptions{Access: []vmm.Access{{Location: cuda.OnHost(), Mode: vmm.ReadWrite}}}), cuda.ErrNotSupported, "cannot reach device memory"},
		{"buffer with odd access", newBuffer(vmm.BufferOptions{Access: []vmm.Access{{Location: d.Location(), Mode: 2}}}), cuda.ErrInvalidArgument, "AccessMode(2)"},
		{"map nothing", mapAt(0, nil), cuda.ErrInvalidArgument, "nil memory"},
		{"map no allocation", mapAt(0, (*vmm.Allocation)(nil)), cuda.ErrInvalidArgument, "nil memory"},
		{"map before the range", mapAt(-2*mib, a), cuda.ErrOutOfRange, "-2097152"},
		{"map behind the range", mapAt(8*mib, a), cuda.ErrOutOfRange, "8 MiB"},
		{"map over a mapping", mapAt(2*mib, a), cuda.ErrInUse, "mapped at offset 2 MiB"},
		{"map misaligned", mapAt(4*mib+1, a), cuda.ErrInvalidArgument, "multiples of the granularity, 2 MiB"},
		{"map closed memory", mapAt(0, gone), cuda.ErrClosed, ""},
		{"map foreign memory", mapAt(0, foreignMemory), cuda.ErrForeign, ""},
		{"grant a gap", r.SetAccess(0, 4*mib, vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite}), cuda.ErrOutOfRange, "whole mappings"},
		{"grant half a mapping", r.SetAccess(2*mib, mib, vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite}), cuda.ErrOutOfRange, "whole mappings"},
		{"grant nothing", mapping.SetAccess(), cuda.ErrInvalidArgument, "at least one"},
		{"close a range in use", r.Close(), cuda.ErrInUse, "1 mapping,"},
		{"grow by less than nothing", gputest.Err(b.AppendUndefined(-1)), cuda.ErrInvalidArgument, "-1"},
		{"grow absurdly", gputest.Err(b.AppendUndefined(math.MaxInt)), cuda.ErrCapacity, "1000 used of 67108864"},
		{"resize to less than nothing", b.Resize(nil, -1), cuda.ErrInvalidArgument, "-1"},
		{"resize beyond the range", b.Resize(nil, 65*mib), cuda.ErrCapacity, ""},
		{"shrink on a foreign stream", b.Resize(foreign, 10), cuda.ErrForeign, ""},
		{"append on a foreign stream", gputest.Err(b.Append(foreign, []byte{1})), cuda.ErrForeign, ""},
		{"append on a stream without access", gputest.Err(b.Append(farStream, []byte{1})), cuda.ErrNotPermitted, "SetAccess"},
		{"append a negative length", gputest.Err(b.AppendPtr(nil, b.Ptr(), -1)), cuda.ErrInvalidArgument, "-1"},
		{"append a zero slice", gputest.Err(b.AppendSlice(nil, vmm.Slice[byte]{})), cuda.ErrInvalidArgument, "zero Slice"},
		{"append a zero host slice", gputest.Err(b.AppendHost(nil, cuda.HostSlice{})), nil, ""},
		{"slice before the start", cut(-1, 1), cuda.ErrOutOfRange, "-1 to 1"},
		{"slice behind the end", cut(999, 1001), cuda.ErrOutOfRange, "999 to 1001 of 1000"},
		{"slice of absurd length", cut(1, math.MaxInt), cuda.ErrOutOfRange, "1 to 9223372036854775807"},
		{"slice backwards", cut(5, 3), cuda.ErrOutOfRange, "5 to 3 of 1000"},
		{"copy from the wrong length", short.CopyFrom(nil, make([]byte, 99)), cuda.ErrOutOfRange, "99 bytes for a slice of 100"},
		{"copy to the wrong length", short.CopyTo(nil, make([]byte, 101)), cuda.ErrOutOfRange, ""},
		{"copy a zero slice", vmm.Slice[byte]{}.CopyTo(nil, nil), cuda.ErrInvalidArgument, ""},
	} {
		if row.is == nil {
			require.NoError(t, row.err, row.what)
			continue
		}
		require.ErrorIs(t, row.err, row.is, row.what)
		require.ErrorContains(t, row.err, row.says, row.what)
	}
	now, _ := m.Memory(0)
	require.Equal(t, free, now, "no memory was taken")
	require.Len(t, d.System().Live(), len(live), "no object was made")
	require.Equal(t, 1000, b.Len())
}

func TestASliceOutlivesItsMemoryAsAnError(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{})
		require.NoError(t, err)
		require.NoError(t, gputest.Err(b.Append(nil, pattern(1000, 1))))
		s, err := b.Slice(500, 1000)
		require.NoError(t, err)
		require.NoError(t, b.Resize(nil, 700))
		require.ErrorIs(t, s.CopyTo(nil, make([]byte, 500)), cuda.ErrOutOfRange)
		half, err := s.Slice(0, 200)
		require.NoError(t, err)
		require.NoError(t, half.CopyTo(nil, make([]byte, 200)))
		require.NoError(t, b.Close())
		require.ErrorIs(t, half.CopyTo(nil, make([]byte, 200)), cuda.ErrClosed)
		require.ErrorIs(t, gputest.Err(b.AppendUndefined(1)), cuda.ErrClosed)
		require.ErrorIs(t, b.Clip(), cuda.ErrClosed)
		_, err = b.Move(vmm.MoveOptions{Reserve: 64 * mib})
		require.ErrorIs(t, err, cuda.ErrClosed)
	})
}

func TestAThousandRoundsLeaveNothing(t *testing.T) {
	rounds := func(t *testing.T, d *cuda.Device) {
		var free int
		for i := range 1000 {
			b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib})
			require.NoError(t, err)
			require.NoError(t, gputest.Err(b.AppendUndefined(5*mib)))
			require.NoError(t, gputest.Err(b.Append(nil, []byte{1, 2, 3})))
			require.NoError(t, b.Resize(nil, mib))
			require.NoError(t, b.Clip())
			require.NoError(t, b.Close())
			if i == 0 { // what the library itself keeps is there from now on
				free, _, err = d.MemoryInfo()
				require.NoError(t, err)
			}
		}
		now, _, err := d.MemoryInfo()
		require.NoError(t, err)
		require.Equal(t, free, now)
		st := d.System().Stats()
		require.Zero(t, st.Reservations)
		require.Zero(t, st.Allocations)
		require.Zero(t, st.Mappings)
	}
	gputest.Each(t, rounds)
	t.Run("in the driver", func(t *testing.T) {
		m, d := open(t)
		rounds(t, d)
		require.Zero(t, m.Live()["reservation"])
	})
}

func TestWriterAndReaderRoundTrip(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{})
		require.NoError(t, err)
		closed(t, b)
		want := pattern(9*mib+17, 5)
		w := vmm.NewWriter(b)
		n, err := w.Write(want[:1000])
		require.NoError(t, err)
		require.Equal(t, 1000, n)
		copied, err := io.Copy(w, bytes.NewReader(want[1000:]))
		require.NoError(t, err)
		require.EqualValues(t, len(want)-1000, copied)
		var got bytes.Buffer
		copied, err = io.Copy(&got, vmm.NewReader(b))
		require.NoError(t, err)
		require.EqualValues(t, len(want), copied)
		require.True(t, bytes.Equal(want, got.Bytes()))
		_, err = vmm.NewReader(b).Read(nil)
		require.NoError(t, err)
	})
}

func TestAppendOnAClosedStreamChangesNothing(t *testing.T) {
	_, d := open(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{})
	require.NoError(t, err)
	closed(t, b)
	require.NoError(t, gputest.Err(b.Append(nil, pattern(mib, 1))))
	before := b.Stats()
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	require.NoError(t, s.Close())
	_, err = b.Append(s, pattern(9*mib, 1))
	require.ErrorIs(t, err, cuda.ErrClosed)
	require.ErrorContains(t, err, "the stream is closed")
	require.Equal(t, before, b.Stats())
	_, other := open(t)
	foreign, err := vmm.NewBuffer(other, vmm.BufferOptions{})
	require.NoError(t, err)
	closed(t, foreign)
	require.NoError(t, gputest.Err(foreign.AppendUndefined(10)))
	part, err := foreign.Slice(0, 10)
	require.NoError(t, err)
	_, err = b.AppendSlice(nil, part)
	require.ErrorIs(t, err, cuda.ErrForeign)
	require.EqualError(t, err, "vmm.Buffer.AppendSlice: object of another System: the slice belongs to another System; use objects that were made from the same System")
	require.Equal(t, before, b.Stats())
}

func TestNilIsRefused(t *testing.T) {
	_, err := vmm.ArrayOf[int](nil)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = (*vmm.Buffer)(nil).Move(vmm.MoveOptions{Reserve: 2 * mib})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
}

func TestAClosedSystemAnswersSo(t *testing.T) {
	m, err := sim.New(sim.Options{})
	require.NoError(t, err)
	closed(t, m)
	s, err := m.Open(cuda.Options{})
	require.NoError(t, err)
	d := s.Devices()[0]
	_, _, err = d.MemoryInfo()
	require.NoError(t, err)
	require.NoError(t, s.Close())
	for what, do := range map[string]func() error{
		"NewBuffer":     func() error { _, err := vmm.NewBuffer(d, vmm.BufferOptions{}); return err },
		"Create":        func() error { _, err := vmm.Create(d, 2*mib, vmm.Properties{}); return err },
		"Reserve":       func() error { _, err := vmm.Reserve(d, 2*mib, vmm.ReserveOptions{}); return err },
		"NewStream":     func() error { _, err := d.NewStream(cuda.StreamOptions{}); return err },
		"NewEvent":      func() error { _, err := d.NewEvent(cuda.EventOptions{}); return err },
		"NewHostBuffer": func() error { _, err := d.NewHostBuffer(10); return err },
		"MemoryInfo":    func() error { _, _, err := d.MemoryInfo(); return err },
		"Probe":         func() error { _, err := d.Probe(); return err },
		"Transfer":      func() error { _, err := d.Transfer(); return err },
		"LoadModule":    func() error { _, err := d.LoadModule([]byte(".version 7.0")); return err },
	} {
		require.ErrorIs(t, do(), cuda.ErrClosed, what)
	}
	require.Empty(t, s.Live())
}
