//go:build linux

package handles

import (
	"encoding/binary"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

var offered = Descriptor{Kind: BufferKind, Length: 1, Chunks: []uint64{2 << 20}, Location: cuda.OnDevice(0), Device: cuda.UUID{1}, Handle: vmm.PosixFD}

func someOffer(t testing.TB, number uint32) Message {
	t.Helper()
	m, err := offerMessage(number, identity{7}, &offered)
	require.NoError(t, err)
	return m
}

func TestTransferMessagesAreReadAsWritten(t *testing.T) {
	who, d, err := parseOffer(someOffer(t, 5))
	require.NoError(t, err)
	require.Equal(t, identity{7}, who)
	require.Equal(t, offered, d)
	for _, m := range []Message{someOffer(t, 5), countMessage(takenKind, 5, 9), transferMessage(mappedKind, 5), transferMessage(confirmedKind, 5),
		reasonMessage(declinedKind, 5, errors.New("no")), reasonMessage(byFDKind, 5, errors.New("no")), fabricMessage(5, 9, cuda.FabricHandle{}), reasonMessage(withdrawnKind, 5, errors.New(""))} {
		number, err := transferOf(m)
		require.NoError(t, err)
		require.EqualValues(t, 5, number)
	}
	require.EqualValues(t, 9, countOf(countMessage(takenKind, 5, 9)))
	require.ErrorContains(t, reasonOf("op", reasonMessage(declinedKind, 5, errors.New("the \x00 reason"))), `"the \x00 reason"`)
	// A long reason is cut between two letters.
	for cut := range 4 {
		m := reasonMessage(declinedKind, 1, errors.New(strings.Repeat("x", reasonBytes-2+cut)+"€€"))
		require.LessOrEqual(t, len(m.Body), transferHeader+reasonBytes)
		require.True(t, utf8.Valid(m.Body[transferHeader:]))
		_, err := transferOf(m)
		require.NoError(t, err)
	}
}

func TestTransferMessagesThatNoPeerSends(t *testing.T) {
	body := func(kind uint16, n int) Message { return Message{Kind: kind, Body: make([]byte, n)} }
	for _, m := range []Message{
		body(offerKind, transferHeader+identityBytes+descriptorHeader-1), body(chunksKind, 7), body(chunksKind, 9), body(chunksKind, 8),
		body(takenKind, 4), body(mappedKind, 3), body(mappedKind, 5), body(confirmedKind, 0), body(confirmedKind, 8),
		body(declinedKind, 3), body(declinedKind, transferHeader+reasonBytes+1), body(withdrawnKind, transferHeader+reasonBytes+1),
		{Kind: mappedKind, Body: make([]byte, 4), FDs: make([]*FD, 1)},
		body(byFDKind, 3), body(byFDKind, transferHeader+reasonBytes+1), body(fabricKind, 8), body(fabricKind, 8+63), body(fabricKind, 8+65),
		body(fabricKind, 8+64*(chunkBatch+1)), {Kind: fabricKind, Body: make([]byte, 8+64), FDs: make([]*FD, 1)},
		{Kind: offerKind, Body: someOffer(t, 1).Body, FDs: make([]*FD, 1)},
		{Kind: chunksKind, Body: make([]byte, 8), FDs: make([]*FD, chunkBatch+1)},
	} {
		_, err := transferOf(m)
		require.ErrorIs(t, err, ErrProtocol, "kind %d, %d bytes, %d descriptors", m.Kind, len(m.Body), len(m.FDs))
	}
}

func newInbox() *inbox {
	b := new(inbox)
	b.init()
	return b
}

func TestTransfersInTurn(t *testing.T) {
	before := OpenFDs()
	b := newInbox()
	part := func(number uint32, fds int) Message {
		m := countMessage(chunksKind, number, 1)
		m.FDs = someFDs(t, fds)
		return m
	}
	offer := func(number uint32) Message {
		return someOffer(t, number)
	}
	require.NoError(t, b.put(offer(1)))
	require.NoError(t, b.put(part(1, 2)))
	one := b.offered()
	require.NotNil(t, one)
	one.taken = true
	require.Nil(t, b.offered())
	require.Len(t, one.parts, 1)
	one.mapped = true
	require.NoError(t, b.put(transferMessage(confirmedKind, 1)))
	// The next may come while the one before is not looked at yet.
	require.NoError(t, b.put(offer(2)))
	require.Equal(t, uint32(2), b.offered().number)
	b.end(one)
	require.Equal(t, uint32(2), b.offered().number)
	require.NoError(t, b.put(part(1, 1)), "of a transfer that ended: dropped")
	require.NoError(t, b.put(reasonMessage(withdrawnKind, 2, errors.New("no"))))
	require.Nil(t, b.offered(), "nobody saw it")
	require.Equal(t, before, OpenFDs())

	require.NoError(t, b.put(offer(3)))
	b.out.begun = 1
	require.NoError(t, b.put(transferMessage(mappedKind, 1)))
	require.Len(t, b.out.answers, 1)
	b.out.ended, b.out.answers = 1, nil
	require.NoError(t, b.put(transferMessage(mappedKind, 1)), "late: dropped")
	require.Empty(t, b.out.answers)
	b.discard()
	require.Equal(t, before, OpenFDs())
}

func TestTransfersOutOfTurn(t *testing.T) {
	for _, c := range []struct {
		name string
		m    Message
		want string
	}{
		{"an offer behind one that runs", someOffer(t, 2), "which has not ended"},
		{"an offer again", someOffer(t, 1), "which has not ended"},
		{"an offer with a gap", someOffer(t, 9), "which has not ended"},
		{"a part of none", Message{Kind: chunksKind, Body: []byte{2, 0, 0, 0, 0, 0, 0, 0}, FDs: someFDs(t, 1)}, "was not offered"},
		{"a confirmation of none", transferMessage(confirmedKind, 2), "was not offered"},
		{"a confirmation too early", transferMessage(confirmedKind, 1), "before it was mapped"},
		{"an answer to none", transferMessage(mappedKind, 1), "an answer to transfer 1"},
	} {
		b := newInbox()
		require.NoError(t, b.put(someOffer(t, 1)))
		before := OpenFDs() - len(c.m.FDs)
		err := b.put(c.m)
		require.ErrorIs(t, err, ErrProtocol, c.name)
		require.ErrorContains(t, err, c.want, c.name)
		require.Equal(t, before, OpenFDs(), c.name)
	}
	// So many parts nobody sends, nor answers, nor anything behind the end.
	b := newInbox()
	require.NoError(t, b.put(someOffer(t, 1)))
	b.offered().taken = true
	var err error
	for n := 0; err == nil; n++ {
		require.LessOrEqual(t, n, chunkWindow+1)
		m := countMessage(chunksKind, 1, n)
		m.FDs = someFDs(t, 1)
		err = b.put(m)
	}
	require.ErrorIs(t, err, ErrProtocol)
	b.discard()
	b.out.begun = 1
	err = nil
	for n := 0; err == nil; n++ {
		require.LessOrEqual(t, n, 2*chunkWindow+1)
		err = b.put(countMessage(takenKind, 1, n))
	}
	b = newInbox()
	require.NoError(t, b.put(someOffer(t, 1)))
	b.offered().taken = true
	require.NoError(t, b.put(reasonMessage(withdrawnKind, 1, errors.New("no"))))
	require.ErrorIs(t, b.put(reasonMessage(withdrawnKind, 1, errors.New("no"))), ErrProtocol)
}

func TestTheProgramsMessagesAreBounded(t *testing.T) {
	for _, c := range []struct {
		m    func() Message
		most int
	}{
		{func() Message { return Message{Kind: 1} }, waitingMessages},
		{func() Message { return Message{Kind: 1, Body: make([]byte, MaxBody)} }, waitingBytes / MaxBody},
		{func() Message { return Message{Kind: 1, FDs: someFDs(t, 32)} }, waitingFDs / 32},
	} {
		b := newInbox()
		n := 0
		for ; !b.full(); n++ {
			require.NoError(t, b.put(c.m()))
		}
		require.Equal(t, c.most, n)
		m, ok := b.takeProgram()
		require.True(t, ok)
		require.NoError(t, m.Close())
		require.False(t, b.full())
		b.discard()
		require.False(t, b.full())
		_, ok = b.takeProgram()
		require.False(t, ok)
	}
}

func FuzzTransferMessages(f *testing.F) {
	f.Add(offerKind, someOffer(f, 3).Body, uint8(1))
	f.Add(chunksKind, countMessage(chunksKind, 3, 1).Body, uint8(64))
	f.Add(takenKind, countMessage(takenKind, 3, 1).Body, uint8(0))
	f.Add(declinedKind, reasonMessage(declinedKind, 1, errors.New("no")).Body, uint8(0))
	f.Add(byFDKind, reasonMessage(byFDKind, 1, errors.New("no")).Body, uint8(0))
	f.Add(fabricKind, fabricMessage(1, 2, cuda.FabricHandle{3}, cuda.FabricHandle{4}).Body, uint8(0))
	f.Fuzz(func(t *testing.T, kind uint16, body []byte, fds uint8) {
		if kind <= MaxKind || kind > lastKind {
			return
		}
		m := Message{Kind: kind, Body: body, FDs: make([]*FD, fds)}
		number, err := transferOf(m)
		if err != nil {
			require.ErrorIs(t, err, ErrProtocol)
			return
		}
		require.LessOrEqual(t, len(m.FDs), chunkBatch)
		require.Equal(t, binary.LittleEndian.Uint32(body), number)
		switch kind {
		case chunksKind, takenKind:
			require.Equal(t, body, countMessage(kind, number, int(countOf(m))).Body)
		case withdrawnKind, declinedKind:
			require.ErrorIs(t, reasonOf("op", m), ErrRefused)
		case fabricKind:
			require.Equal(t, body, fabricMessage(number, int(countOf(m)), fabricHandlesOf(m)...).Body)
		case offerKind:
			who, d, err := parseOffer(m)
			if err != nil {
				return
			}
			again, err := offerMessage(number, who, &d)
			require.NoError(t, err)
			require.Equal(t, body, again.Body)
		}
	})
}

// FuzzInbox has a peer send what it likes while this side takes, ends and
// offers transfers: nothing grows without bound, and nothing is left open.
func FuzzInbox(f *testing.F) {
	f.Add([]byte{0, 1, 8, 1, 1, 9, 3, 1, 10})
	f.Add([]byte{0, 1, 2, 1, 0, 2, 11, 4, 1, 5, 1, 12})
	f.Add([]byte{0, 1, 8, 0, 9, 0, 3, 1, 0, 2, 10, 0, 8, 0})
	f.Fuzz(func(t *testing.T, steps []byte) {
		before := OpenFDs()
		b := newInbox()
		var taken *transfer
		fds := 0
		for len(steps) >= 2 && fds < 64 {
			step, number := steps[0], uint32(steps[1])
			steps = steps[2:]
			var m Message
			switch step % 13 {
			case 0:
				m = someOffer(t, number)
			case 1:
				m = countMessage(chunksKind, number, 1)
				m.FDs = someFDs(t, 1)
				fds++
			case 2:
				m = reasonMessage(withdrawnKind, number, errors.New("no"))
			case 3:
				m = transferMessage(confirmedKind, number)
			case 4:
				m = countMessage(takenKind, number, 1)
			case 5:
				m = transferMessage(mappedKind, number)
			case 6:
				m = reasonMessage(declinedKind, number, errors.New("no"))
			case 7:
				m = Message{Kind: 1}
			case 8:
				if tr := b.offered(); tr != nil && taken == nil {
					taken, tr.taken = tr, true
				}
			case 9:
				if taken != nil {
					taken.mapped = true
				}
			case 10:
				if taken != nil {
					b.end(taken)
					taken = nil
				}
			case 11:
				if b.out.begun == b.out.ended {
					b.out.begun++
				}
			case 12:
				b.out.ended, b.out.answers = b.out.begun, nil
			}
			if m.Kind != 0 {
				if err := b.put(m); err != nil {
					require.ErrorIs(t, err, ErrProtocol)
					break
				}
			}
			require.LessOrEqual(t, len(b.in.open), 2)
			for _, tr := range b.in.open {
				require.LessOrEqual(t, len(tr.parts), chunkWindow+1)
			}
			require.LessOrEqual(t, len(b.out.answers), 2*chunkWindow+1)
			b.program = nil // Receive takes them
		}
		if taken != nil {
			b.end(taken)
		}
		b.discard()
		require.Equal(t, before, OpenFDs())
	})
}
