//go:build linux

package handles

import (
	"encoding/binary"
	"errors"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/vectors"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// hostile is a peer that sends an importer anything.
type hostile struct {
	t         *testing.T
	near, far *peer.Conn
	d         *cuda.Device
	offers    uint32
	chunks    []*phys.Handle // two of 64 KiB on device 0
	honest    Descriptor
}

func newHostile(t *testing.T, timeout time.Duration) *hostile {
	before := peer.OpenFDs()
	t.Cleanup(func() { require.Equal(t, before, peer.OpenFDs(), "FDs left open") })
	device := sim.DeviceOptions{Granularity: 64 << 10, Memory: 64 << 20}
	_, s := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{device, device}})
	h := &hostile{t: t, d: s.Devices()[0]}
	b, err := vmm.NewBuffer(h.d, vmm.BufferOptions{Reserve: 1 << 20, Chunks: vmm.FixedChunks(64 << 10)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	require.NoError(t, gputest.Err(b.AppendUndefined(128<<10)))
	v, err := share.Of(b).View("test", 128<<10)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, v.Release()) })
	for _, c := range v.Chunks {
		h.chunks = append(h.chunks, c.Handle)
	}
	h.honest = Descriptor{Kind: BufferKind, Length: 128 << 10}
	require.NoError(t, describe("test", &h.honest, core.SystemOf(h.d), h.chunks[0].Asked, h.chunks))
	h.connect(timeout)
	return h
}

// inside looks inside a connection.
func inside(t testing.TB, c *peer.Conn) conn {
	in, err := connOf("test", c)
	require.NoError(t, err)
	in.Release()
	return in
}

func (h *hostile) connect(timeout time.Duration) {
	near, f, err := peer.Pair(peer.Options{Timeout: timeout})
	require.NoError(h.t, err)
	far, err := peer.Inherit(f, peer.Options{Timeout: timeout})
	require.NoError(h.t, err)
	h.near, h.far, h.offers = near, far, 0
	h.t.Cleanup(func() {
		require.NoError(h.t, near.Close())
		require.NoError(h.t, far.Close())
	})
}

// memory makes descriptors of the chunks.
func (h *hostile) memory(n int) []*peer.FD {
	var exports exchange.Set
	fds, err := exports.OpenSome(h.t.Context(), "test", h.chunks[:n], peertest.Guard)
	require.NoError(h.t, err)
	h.t.Cleanup(func() { exports.Close(fds) })
	return fds
}

func fabricMessage(t uint32, first int, all ...cuda.FabricHandle) peer.Message {
	return message{kind: wire.Fabric, transfer: t, count: uint32(first), fabric: all}.pack()
}

// foreign makes a descriptor of something else.
func (h *hostile) foreign(open func() (int, error)) []*peer.FD {
	n, err := open()
	require.NoError(h.t, err)
	f, err := peer.NewFD(n)
	require.NoError(h.t, err)
	h.t.Cleanup(func() { _ = f.Close() })
	return []*peer.FD{f}
}

// offer sends any descriptor, with descriptors of files.
func (h *hostile) offer(d Descriptor, fds []*peer.FD) {
	h.offers++
	b, err := d.MarshalBinary()
	if err != nil { // a form that no encoder writes
		honest := h.honest
		honest.Chunks = make([]int, len(d.Chunks))
		for i := range honest.Chunks {
			honest.Chunks[i] = 64 << 10
		}
		honest.Length = 0
		b, err = honest.MarshalBinary()
		require.NoError(h.t, err)
		for i, c := range d.Chunks {
			binary.LittleEndian.PutUint64(b[descriptorHeader+8*i:], uint64(c))
		}
	}
	h.send(message{kind: wire.Offer, transfer: h.offers, rest: b}.pack())
	if len(fds) > 0 {
		h.send(message{kind: wire.Chunks, transfer: h.offers, fds: fds}.pack())
	}
}

func (h *hostile) send(m peer.Message) {
	require.NoError(h.t, link.Of(h.near).Send(h.t.Context(), "test", m))
}

// Any invalid offer is a typed error within the timeout, nothing of it is kept, and
// the connection goes on.
func TestHostileOffers(t *testing.T) {
	one := func(d Descriptor) Descriptor { d.Chunks, d.Length = d.Chunks[:1], 1; return d }
	for _, c := range []struct {
		name string
		do   func(h *hostile)
		want error
		says string
	}{
		{"a device that is not here", func(h *hostile) {
			d := h.honest
			d.Device = cuda.UUID{9, 9}
			h.offer(d, h.memory(2))
		}, cuda.ErrNotSupported, "GPU-09090000-0000-0000-0000-000000000000"},
		{"a device that the memory is not on", func(h *hostile) {
			d := h.honest
			d.Device = h.d.System().Devices()[1].UUID()
			h.offer(d, h.memory(2))
		}, ErrMismatch, "chunk 0 is memory of type 1 on device 0, but type 1 on device 1 was declared"},
		{"a location that the memory is not at", func(h *hostile) {
			d := one(h.honest)
			d.Location, d.Device, d.Chunks = cuda.OnHostNUMA(0), cuda.UUID{}, []int{2 << 20}
			h.offer(d, h.memory(1))
		}, ErrMismatch, "but type 1 on host NUMA node 0 was declared"},
		{"no multiple of the granularity", func(h *hostile) {
			d := one(h.honest)
			d.Chunks = []int{65<<10 + 1}
			h.offer(d, h.memory(1))
		}, ErrSizeMismatch, "no multiple of 64 KiB"},
		{"twice the size", func(h *hostile) {
			d := one(h.honest)
			d.Chunks = []int{128 << 10}
			h.offer(d, h.memory(1))
		}, ErrSizeMismatch, "a size other than the exporter declared"},
		{"sizes that overflow", func(h *hostile) {
			d := h.honest
			d.Chunks = []int{-64 << 10, 64 << 10} // 2^64 - 65536 and 65536
			h.offer(d, h.memory(2))
		}, peer.ErrTooLarge, "no device has that much"},
		{"an empty chunk", func(h *hostile) {
			d := h.honest
			d.Chunks = []int{0, 64 << 10}
			h.offer(d, h.memory(2))
		}, ErrDescriptor, "chunk 0 has 0 bytes"},
		{"more than the device has", func(h *hostile) {
			d := one(h.honest)
			d.Chunks = []int{1 << 40}
			h.offer(d, h.memory(1))
		}, peer.ErrTooLarge, "64 MiB are allowed"},
		{"garbage", func(h *hostile) {
			h.offers++
			h.send(message{kind: wire.Offer, transfer: 1, rest: make([]byte, descriptorHeader)}.pack())
		}, ErrDescriptor, "begins with"},
		{"a fabric handle that is none", func(h *hostile) {
			d := one(h.honest)
			d.Handle = vmm.Fabric
			h.offer(d, nil)
			h.send(fabricMessage(h.offers, 0, cuda.FabricHandle{1}))
		}, cuda.ErrNotSupported, "fabric"},
		{"descriptors of an offer by fabric", func(h *hostile) {
			d := h.honest
			d.Handle = vmm.Fabric
			h.offer(d, h.memory(2))
		}, peer.ErrProtocol, "a message of kind 0xff02, where memory of those handle types comes in 0xff08"},
		{"a fabric handle of an offer by descriptor", func(h *hostile) {
			h.offer(h.honest, nil)
			h.send(fabricMessage(h.offers, 0, cuda.FabricHandle{1}))
		}, peer.ErrProtocol, "a message of kind 0xff08, where memory of those handle types comes in 0xff02"},
		{"more descriptors than chunks", func(h *hostile) { h.offer(one(h.honest), h.memory(2)) }, ErrMismatch, "more file descriptors"},
		{"fewer descriptors than chunks", func(h *hostile) { h.offer(h.honest, h.memory(1)) }, peer.ErrTimeout, "further chunk"},
		{"no descriptors", func(h *hostile) { h.offer(h.honest, nil) }, peer.ErrTimeout, "further chunk"},
		{"the same chunk again", func(h *hostile) {
			h.offer(h.honest, h.memory(1))
			h.send(message{kind: wire.Chunks, transfer: h.offers, fds: h.memory(1)}.pack())
		}, peer.ErrProtocol, "where 1 is the next"},
		{"withdrawn in the middle", func(h *hostile) {
			h.offer(h.honest, h.memory(1))
			// Not before it is taken, or nothing sees it.
			near := inside(h.t, h.near)
			_, err := near.awaitOwed(h.t.Context(), "test", "reply", &near.out.replies, &near.out.spinner)
			require.NoError(h.t, err)
			h.send(failed(wire.Withdrawn, h.offers, errors.New("changed my mind")).pack())
		}, peer.ErrRefused, "changed my mind"},
		{"no confirmation", func(h *hostile) { h.offer(h.honest, h.memory(2)) }, peer.ErrTimeout, "confirmation"},
		{"the null device", func(h *hostile) {
			h.offer(one(h.honest), h.foreign(func() (int, error) { return syscall.Open(os.DevNull, syscall.O_RDWR|syscall.O_CLOEXEC, 0) }))
		}, ErrNotMemory, "chunk 0"},
		{"a directory", func(h *hostile) {
			h.offer(one(h.honest), h.foreign(func() (int, error) { return syscall.Open("/", syscall.O_RDONLY|syscall.O_CLOEXEC, 0) }))
		}, ErrNotMemory, "chunk 0"},
		{"a socket", func(h *hostile) {
			h.offer(one(h.honest), h.foreign(func() (int, error) { return syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0) }))
		}, ErrNotMemory, "chunk 0"},
		{"a pipe", func(h *hostile) {
			h.offer(one(h.honest), h.foreign(func() (int, error) {
				var p [2]int
				err := syscall.Pipe2(p[:], syscall.O_CLOEXEC)
				if err == nil {
					err = syscall.Close(p[1])
				}
				return p[0], err
			}))
		}, ErrNotMemory, "chunk 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			timeout := peertest.Guard
			if errors.Is(c.want, peer.ErrTimeout) {
				timeout = 150 * time.Millisecond
			}
			h := newHostile(t, timeout)
			b := inside(t, h.near)
			off := b.transfers
			off.mu.Lock()
			off.out.begun = 1 // it accepts the replies
			off.mu.Unlock()
			before := h.d.System().Stats()
			var group errgroup.Group
			group.Go(func() error { c.do(h); return nil })
			_, err := ReceiveBuffer(t.Context(), h.far, h.d, ImportOptions{})
			require.NoError(t, group.Wait())
			require.ErrorIs(t, err, c.want)
			require.ErrorContains(t, err, c.says)
			after := h.d.System().Stats()
			before.SharedReleased, before.SharedReleasedBytes = after.SharedReleased, after.SharedReleasedBytes
			require.Equal(t, before, after)

			// The next offer is valid.
			peertest.SetTimeout(h.near, peertest.Guard)
			peertest.SetTimeout(h.far, peertest.Guard)
			off.mu.Lock()
			off.out.begun, off.out.ended, off.out.replies = h.offers, h.offers, nil
			off.mu.Unlock()
			group.Go(func() error { return b.offerHandles(t.Context(), "test", &h.honest, h.chunks) })
			got, err := ReceiveBuffer(t.Context(), h.far, h.d, ImportOptions{})
			require.NoError(t, err)
			require.NoError(t, group.Wait())
			require.NoError(t, got.Close())
		})
	}
}

// A confirmation of memory that is not mapped, like any other violation of the protocol,
// ends the connection for both sides.
func TestHostileTransfersEndTheConnection(t *testing.T) {
	for name, do := range map[string]func(h *hostile){
		"confirmed too early": func(h *hostile) {
			h.offer(h.honest, h.memory(1))
			h.send(message{kind: wire.Confirmed, transfer: 1}.pack())
		},
		"two offers": func(h *hostile) {
			h.offer(h.honest, h.memory(1))
			h.offer(h.honest, h.memory(1))
		},
		"a reason that is not UTF-8": func(h *hostile) {
			h.offer(h.honest, h.memory(1))
			h.send(message{kind: wire.Withdrawn, transfer: 1, rest: []byte("\xff")}.pack())
		},
		"a withdrawal with a gap": func(h *hostile) {
			h.send(failed(wire.Withdrawn, 2, errors.New("no")).pack())
		},
		"a withdrawal of the next transfer before the end of the one before": func(h *hostile) {
			h.offer(h.honest, h.memory(1))
			h.send(failed(wire.Withdrawn, 2, errors.New("no")).pack())
		},
		"a reply": func(h *hostile) {
			h.send(message{kind: wire.Mapped, transfer: 1}.pack())
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHostile(t, peertest.Guard)
			do(h)
			_, err := ReceiveBuffer(t.Context(), h.far, h.d, ImportOptions{})
			require.ErrorIs(t, err, peer.ErrProtocol)
			_, err = h.far.Receive(t.Context())
			require.ErrorIs(t, err, peer.ErrProtocol)
			_, err = h.near.Receive(t.Context())
			require.True(t, errors.Is(err, peer.ErrRefused) || errors.Is(err, peer.ErrGone), "%v", err)
		})
	}
}

// Chunks that do not come as offered end the transfer alone, or the connection where none are
// due, as the table for all implementations says.
func TestTransfersThatNoSenderMakes(t *testing.T) {
	kinds := map[string]uint16{"chunks": wire.Chunks, "fabric": wire.Fabric, "confirmed": wire.Confirmed}
	for _, v := range vectors.ReadTransfers(t) {
		t.Run(v.Name, func(t *testing.T) {
			h := newHostile(t, peertest.Guard)
			near := inside(t, h.near)
			near.out.begun = 1 // it takes the replies
			reply := func() (message, error) {
				return near.awaitOwed(peertest.Context(t), "test", "reply", &near.out.replies, &near.out.spinner)
			}
			var group errgroup.Group
			group.Go(func() error {
				_, err := ReceiveBuffer(peertest.Context(t), h.far, h.d, ImportOptions{})
				return err
			})
			d := h.honest
			d.Chunks, d.Length = d.Chunks[:v.Chunks], 1
			h.offer(d, nil)
			for i, part := range v.Parts {
				if i > 0 {
					m, err := reply()
					require.NoError(t, err)
					require.NotEqual(t, wire.Declined, m.kind)
				}
				m := message{kind: kinds[part.Message], transfer: h.offers, count: uint32(part.First)}
				switch m.kind {
				case wire.Chunks:
					m.fds = h.memory(part.Count)
				case wire.Fabric:
					m.fabric = make([]cuda.FabricHandle, part.Count)
				}
				h.send(m.pack())
			}
			m, replied := reply()
			received := group.Wait()
			if v.Ends == "connection" {
				require.ErrorIs(t, received, peer.ErrProtocol)
				require.ErrorIs(t, replied, peer.ErrRefused)
				return
			}
			require.Error(t, received)
			require.NoError(t, replied)
			require.Equal(t, wire.Declined, m.kind)
			require.NoError(t, h.near.Send(t.Context(), peer.Message{Kind: 7}))
			_, err := h.far.Receive(peertest.Context(t))
			require.NoError(t, err)
		})
	}
}

// hears runs a sender against an importer whose replies the test chooses.
func hears(t *testing.T, timeout time.Duration, reply func(h *hostile)) error {
	h := newHostile(t, timeout)
	var group errgroup.Group
	group.Go(func() error { return inside(t, h.near).offerHandles(t.Context(), "test", &h.honest, h.chunks) })
	require.NoError(t, link.Of(h.far).Await(t.Context(), "test", inside(t, h.far).waiting))
	h.near, h.far = h.far, h.near
	reply(h)
	err := group.Wait()
	require.Zero(t, exchange.Exports.Used())
	return err
}

func TestHostileAnswers(t *testing.T) {
	require.ErrorIs(t, hears(t, 200*time.Millisecond, func(*hostile) {}), peer.ErrTimeout)
	require.ErrorIs(t, hears(t, peertest.Guard, func(h *hostile) { h.send(message{kind: wire.Taken, transfer: 1, count: 7}.pack()) }), peer.ErrProtocol)
	require.ErrorIs(t, hears(t, peertest.Guard, func(h *hostile) { h.send(message{kind: wire.Mapped, transfer: 2}.pack()) }), peer.ErrProtocol)
	require.ErrorIs(t, hears(t, peertest.Guard, func(h *hostile) { require.NoError(t, h.near.Close()) }), peer.ErrGone)
	err := hears(t, peertest.Guard, func(h *hostile) { h.send(failed(wire.Declined, 1, errors.New("I have \x1b[31m enough")).pack()) })
	require.ErrorIs(t, err, peer.ErrRefused)
	require.ErrorContains(t, err, `I have \x1b[31m enough`)
	chunks := func(h *hostile) {
		require.NoError(t, link.Of(h.near).Await(t.Context(), "test", func() bool {
			in := inside(t, h.near)
			in.mu.Lock()
			defer in.mu.Unlock()
			return len(in.in.open[0].parts) > 0
		}))
	}
	require.NoError(t, hears(t, peertest.Guard, func(h *hostile) { chunks(h); h.send(message{kind: wire.Mapped, transfer: 1}.pack()) }))
}

// A peer cannot have mapped what was not sent yet.
func TestMemoryThatIsMappedBeforeItWasSent(t *testing.T) {
	for _, c := range []struct {
		all   bool
		under []int
	}{{false, nil}, {false, []int{1}}, {true, []int{1, 2}}} {
		h := newHostile(t, peertest.Guard)
		in := inside(t, h.near)
		in.out.replies = []message{{kind: wire.Mapped, transfer: 1}}
		_, _, err := in.nextReply(t.Context(), "test", c.all, c.under)
		require.ErrorIs(t, err, peer.ErrProtocol)
	}
}

// A warning of a message that never comes does not lengthen the wait.
func TestAWarningOfAnOfferThatNeverEnds(t *testing.T) {
	h := newHostile(t, 200*time.Millisecond)
	h.offer(h.honest, nil)
	h.send(peer.Message{Kind: wire.Warning})
	_, err := ReceiveBuffer(peertest.Context(t), h.far, h.d, ImportOptions{})
	require.ErrorIs(t, err, peer.ErrTimeout)
	require.ErrorContains(t, err, "no further chunk from the peer within 200ms")
}

// The same for a receiver, whose sender closes the descriptors that it exported.
func TestAWarningOfAReplyThatNeverComes(t *testing.T) {
	h := newHostile(t, 200*time.Millisecond)
	require.NoError(t, link.Of(h.far).Send(peertest.Context(t), "test", peer.Message{Kind: wire.Warning}))
	err := inside(t, h.near).offerHandles(peertest.Context(t), "test", &h.honest, h.chunks)
	require.ErrorIs(t, err, peer.ErrTimeout)
	require.ErrorContains(t, err, "no reply from the peer within 200ms")
	require.Zero(t, exchange.Exports.Used())
}

// Exports stay within their share of the limit of open files, which the error names.
func TestExportsStayWithinTheirShare(t *testing.T) {
	h := newHostile(t, 50*time.Millisecond)
	limit, err := exchange.Exports.Acquire(t.Context(), "test", 1, 1<<30)
	require.NoError(t, err)
	defer func() { require.Zero(t, exchange.Exports.Used()) }()
	var exports exchange.Set
	_, err = exports.OpenSome(t.Context(), "test", h.chunks, 10*time.Millisecond)
	require.ErrorIs(t, err, peer.ErrOpenFiles)
	require.ErrorContains(t, err, "1/4 of this process's limit")
	require.ErrorContains(t, err, "ulimit -n")
	// A sender uses what is left of the budget, and waits for more.
	exchange.Exports.Give(1)
	fds, err := exports.OpenSome(t.Context(), "test", h.chunks, peertest.Guard)
	require.NoError(t, err)
	require.Len(t, fds, 1)
	time.AfterFunc(10*time.Millisecond, func() { exports.Close(fds) })
	var another exchange.Set
	fds2, err := another.OpenSome(t.Context(), "test", h.chunks, peertest.Guard)
	require.NoError(t, err)
	require.Len(t, fds2, 1)
	another.Close(fds2)
	exchange.Exports.Give(limit - 1)
}
