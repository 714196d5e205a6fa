//go:build linux

package handles

import (
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

var offered = Descriptor{Kind: BufferKind, Length: 1, Chunks: []int{2 << 20}, Location: cuda.OnDevice(0), Device: cuda.UUID{1}, Handle: vmm.PosixFD}

func someOffer(t testing.TB, number uint32) peer.Message {
	t.Helper()
	b, err := offered.MarshalBinary()
	require.NoError(t, err)
	return message{kind: wire.Offer, transfer: number, rest: b}.pack()
}

func TestTransferMessagesAreReadAsWritten(t *testing.T) {
	for _, m := range []message{
		{kind: wire.Offer, transfer: 5, rest: someOffer(t, 5).Body[4:]}, {kind: wire.Taken, transfer: 5, count: 9}, {kind: wire.Mapped, transfer: 5},
		{kind: wire.Confirmed, transfer: 5}, {kind: wire.Chunks, transfer: 5, count: 9, fds: make([]*peer.FD, 2)},
		{kind: wire.Fabric, transfer: 5, count: 9, fabric: []cuda.FabricHandle{{1}, {2}}},
		failed(wire.Declined, 5, errors.New("no")), failed(wire.Withdrawn, 5, errors.New("")),
	} {
		read, err := parse(m.pack())
		require.NoError(t, err)
		require.Equal(t, m, read)
	}
	require.ErrorContains(t, failed(wire.Declined, 5, errors.New("the \x00 reason")).err("op"), `"the \x00 reason"`)
	// A long reason is cut between two letters.
	for cut := range 4 {
		m := failed(wire.Declined, 1, errors.New(strings.Repeat("x", wire.MaxReason-2+cut)+"€€"))
		require.LessOrEqual(t, len(m.rest), wire.MaxReason)
		require.True(t, utf8.Valid(m.rest))
		_, err := parse(m.pack())
		require.NoError(t, err)
	}
}

func TestTransferMessagesThatNoPeerSends(t *testing.T) {
	body := func(kind uint16, n int) peer.Message { return peer.Message{Kind: kind, Body: make([]byte, n)} }
	for _, m := range []peer.Message{
		body(wire.Offer, 4+descriptorHeader-1), body(wire.Chunks, 7), body(wire.Chunks, 9), body(wire.Chunks, 8),
		body(wire.Taken, 4), body(wire.Mapped, 3), body(wire.Mapped, 5), body(wire.Confirmed, 0), body(wire.Confirmed, 8),
		body(wire.Declined, 3), body(wire.Declined, 4+wire.MaxReason+1), body(wire.Withdrawn, 4+wire.MaxReason+1),
		{Kind: wire.Mapped, Body: make([]byte, 4), FDs: make([]*peer.FD, 1)},
		body(wire.Fabric, 8), body(wire.Fabric, 8+63), body(wire.Fabric, 8+65),
		body(wire.Fabric, 8+64*(wire.MaxBatch+1)), {Kind: wire.Fabric, Body: make([]byte, 8+64), FDs: make([]*peer.FD, 1)},
		{Kind: wire.Offer, Body: someOffer(t, 1).Body, FDs: make([]*peer.FD, 1)},
		{Kind: wire.Chunks, Body: make([]byte, 8), FDs: make([]*peer.FD, wire.MaxBatch+1)},
	} {
		_, err := parse(m)
		require.ErrorIs(t, err, peer.ErrProtocol, "kind %d, %d bytes, %d descriptors", m.Kind, len(m.Body), len(m.FDs))
	}
}

// testInbox closes messages that are not kept, as a connection does.
type testInbox struct{ *transfers }

func newInbox() testInbox { return testInbox{newTransfers()} }

func (b testInbox) put(m peer.Message) error {
	keep, err := b.Sort(m)
	if !keep {
		_ = m.Close()
	}
	return err
}

// someFDs makes n descriptors.
func someFDs(t testing.TB, n int) (all []*peer.FD) {
	t.Helper()
	for range n {
		i, err := syscall.Open(os.DevNull, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
		require.NoError(t, err)
		f, err := peer.NewFD(i)
		require.NoError(t, err)
		all = append(all, f)
	}
	return all
}

func TestTransfersInTurn(t *testing.T) {
	before := peer.OpenFDs()
	b := newInbox()
	part := func(number uint32, fds int) peer.Message {
		return message{kind: wire.Chunks, transfer: number, count: 1, fds: someFDs(t, fds)}.pack()
	}
	offer := func(number uint32) peer.Message {
		return someOffer(t, number)
	}
	require.NoError(t, b.put(offer(1)))
	require.NoError(t, b.put(part(1, 2)))
	one := b.offeredLocked()
	require.NotNil(t, one)
	one.taken = true
	require.Nil(t, b.offeredLocked())
	require.Len(t, one.parts, 1)
	one.mapped = true
	require.NoError(t, b.put(message{kind: wire.Confirmed, transfer: 1}.pack()))
	// The next may come before the one before is processed.
	require.NoError(t, b.put(offer(2)))
	require.Equal(t, uint32(2), b.offeredLocked().number)
	b.endLocked(one)
	require.Equal(t, uint32(2), b.offeredLocked().number)
	require.NoError(t, b.put(part(1, 1)), "of a transfer that ended: dropped")
	require.NoError(t, b.put(failed(wire.Withdrawn, 2, errors.New("no")).pack()))
	require.Nil(t, b.offeredLocked(), "no caller saw it")
	require.Equal(t, failed(wire.Withdrawn, 2, errors.New("no")), *b.in.refused)
	require.Equal(t, before, peer.OpenFDs())

	require.NoError(t, b.put(offer(3)))
	b.out.begun = 1
	require.NoError(t, b.put(message{kind: wire.Mapped, transfer: 1}.pack()))
	require.Len(t, b.out.replies, 1)
	b.out.ended, b.out.replies = 1, nil
	require.NoError(t, b.put(message{kind: wire.Mapped, transfer: 1}.pack()), "late: dropped")
	require.Empty(t, b.out.replies)
	b.Discard()
	require.Equal(t, before, peer.OpenFDs())
}

func TestTransfersOutOfTurn(t *testing.T) {
	for _, c := range []struct {
		name string
		m    peer.Message
		want string
	}{
		{"an offer behind one that runs", someOffer(t, 2), "which has not ended"},
		{"an offer again", someOffer(t, 1), "which has not ended"},
		{"an offer with a gap", someOffer(t, 9), "which has not ended"},
		{"a part of none", peer.Message{Kind: wire.Chunks, Body: []byte{2, 0, 0, 0, 0, 0, 0, 0}, FDs: someFDs(t, 1)}, "was not offered"},
		{"a withdrawal behind one that runs", failed(wire.Withdrawn, 2, errors.New("no")).pack(), "was not offered"},
		{"a withdrawal with a gap", failed(wire.Withdrawn, 9, errors.New("no")).pack(), "was not offered"},
		{"a confirmation of none", message{kind: wire.Confirmed, transfer: 2}.pack(), "was not offered"},
		{"a confirmation too early", message{kind: wire.Confirmed, transfer: 1}.pack(), "before it was mapped"},
		{"a reply to none", message{kind: wire.Mapped, transfer: 1}.pack(), "a reply to transfer 1"},
	} {
		b := newInbox()
		defer b.Discard()
		require.NoError(t, b.put(someOffer(t, 1)))
		before := peer.OpenFDs() - len(c.m.FDs)
		err := b.put(c.m)
		require.ErrorIs(t, err, peer.ErrProtocol, c.name)
		require.ErrorContains(t, err, c.want, c.name)
		require.Equal(t, before, peer.OpenFDs(), c.name)
	}
	// No peer sends so many parts, or replies, or anything behind the end.
	b := newInbox()
	require.NoError(t, b.put(someOffer(t, 1)))
	b.offeredLocked().taken = true
	var err error
	for n := 0; err == nil; n++ {
		require.LessOrEqual(t, n, chunkWindow+1)
		err = b.put(message{kind: wire.Chunks, transfer: 1, count: uint32(n), fds: someFDs(t, 1)}.pack())
	}
	require.ErrorIs(t, err, peer.ErrProtocol)
	b.Discard()
	b = newInbox()
	defer b.Discard()
	b.out.begun = 1
	err = nil
	for n := 0; err == nil; n++ {
		require.LessOrEqual(t, n, 2*chunkWindow+1)
		err = b.put(message{kind: wire.Taken, transfer: 1, count: uint32(n)}.pack())
	}
	b = newInbox()
	defer b.Discard()
	require.NoError(t, b.put(someOffer(t, 1)))
	b.offeredLocked().taken = true
	require.NoError(t, b.put(failed(wire.Withdrawn, 1, errors.New("no")).pack()))
	require.ErrorIs(t, b.put(failed(wire.Withdrawn, 1, errors.New("no")).pack()), peer.ErrProtocol)
}

func FuzzTransferMessages(f *testing.F) {
	f.Add(wire.Offer, someOffer(f, 3).Body, uint8(1))
	f.Add(wire.Chunks, message{kind: wire.Chunks, transfer: 3, count: 1}.pack().Body, uint8(64))
	f.Add(wire.Taken, message{kind: wire.Taken, transfer: 3, count: 1}.pack().Body, uint8(0))
	f.Add(wire.Declined, failed(wire.Declined, 1, errors.New("no")).pack().Body, uint8(0))
	f.Add(wire.Fabric, fabricMessage(1, 2, cuda.FabricHandle{3}, cuda.FabricHandle{4}).Body, uint8(0))
	f.Fuzz(func(t *testing.T, kind uint16, body []byte, fds uint8) {
		if kind <= peer.MaxKind || kind > wire.LastKind {
			return
		}
		m := peer.Message{Kind: kind, Body: body, FDs: make([]*peer.FD, fds)}
		read, err := parse(m)
		if err != nil {
			require.ErrorIs(t, err, peer.ErrProtocol)
			return
		}
		require.LessOrEqual(t, len(m.FDs), wire.MaxBatch)
		require.Equal(t, binary.LittleEndian.Uint32(body), read.transfer)
		switch kind {
		case wire.Withdrawn, wire.Declined:
			require.ErrorIs(t, read.err("op"), peer.ErrRefused)
		case wire.Offer:
			if new(Descriptor).UnmarshalBinary(read.rest) != nil {
				return
			}
		}
		require.Equal(t, body, rewritten(t, read).Body)
	})
}

// FuzzInbox has a peer send anything while this side takes, ends and
// offers transfers: nothing grows without bound, and nothing is left open.
func FuzzInbox(f *testing.F) {
	f.Add([]byte{0, 1, 8, 1, 1, 9, 3, 1, 10})
	f.Add([]byte{0, 1, 2, 1, 0, 2, 11, 4, 1, 5, 1, 12})
	f.Add([]byte{0, 1, 8, 0, 9, 0, 3, 1, 0, 2, 10, 0, 8, 0})
	f.Fuzz(func(t *testing.T, steps []byte) {
		before := peer.OpenFDs()
		b := newInbox()
		var taken *transfer
		fds := 0
		for len(steps) >= 2 && fds < 64 {
			step, number := steps[0], uint32(steps[1])
			steps = steps[2:]
			var m peer.Message
			switch step % 13 {
			case 0:
				m = someOffer(t, number)
			case 1:
				m = message{kind: wire.Chunks, transfer: number, count: 1, fds: someFDs(t, 1)}.pack()
				fds++
			case 2:
				m = failed(wire.Withdrawn, number, errors.New("no")).pack()
			case 3:
				m = message{kind: wire.Confirmed, transfer: number}.pack()
			case 4:
				m = message{kind: wire.Taken, transfer: number, count: 1}.pack()
			case 5:
				m = message{kind: wire.Mapped, transfer: number}.pack()
			case 6:
				m = failed(wire.Declined, number, errors.New("no")).pack()
			case 8:
				if tr := b.offeredLocked(); tr != nil && taken == nil {
					taken, tr.taken = tr, true
				}
			case 9:
				if taken != nil {
					taken.mapped = true
				}
			case 10:
				if taken != nil {
					b.endLocked(taken)
					taken = nil
				}
			case 11:
				if b.out.begun == b.out.ended {
					b.out.begun++
				}
			case 12:
				b.out.ended, b.out.replies = b.out.begun, nil
			}
			if m.Kind != 0 {
				if err := b.put(m); err != nil {
					require.ErrorIs(t, err, peer.ErrProtocol)
					break
				}
			}
			require.LessOrEqual(t, len(b.in.open), 2)
			for _, tr := range b.in.open {
				require.LessOrEqual(t, len(tr.parts), chunkWindow+1)
			}
			require.LessOrEqual(t, len(b.out.replies), 2*chunkWindow+1)
		}
		if taken != nil {
			b.endLocked(taken)
		}
		b.Discard()
		require.Equal(t, before, peer.OpenFDs())
	})
}
