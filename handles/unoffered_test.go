//go:build linux

package handles

import (
	"context"
	"encoding/hex"
	"errors"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/vectors"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// TestSendersThatFailBeforeTheirOffer has each step of a sender before its offer fail: the
// receiver that waits returns the reason, or the one that comes later, and the connection goes on.
func TestSendersThatFailBeforeTheirOffer(t *testing.T) {
	peertest.NoLeak(t)
	m, s := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{{Granularity: 64 << 10, Memory: 64 << 20}}})
	d := s.Devices()[0]
	buffer := func(types vmm.HandleTypes) *vmm.Buffer {
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 1 << 20, Chunks: vmm.FixedChunks(64 << 10), Memory: vmm.Properties{Handles: types}})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, b.Close()) })
		require.NoError(t, gputest.Err(b.AppendUndefined(64<<10)))
		return b
	}
	good, private, closed, unknown := buffer(vmm.PosixFD), buffer(vmm.NoHandles), buffer(vmm.PosixFD), buffer(vmm.PosixFD)
	require.NoError(t, closed.Close())
	near, far := peertest.Pair(t, peer.Options{})
	ctx := peertest.Context(t)
	over, cancel := context.WithCancel(ctx)
	cancel()
	receive := func() error {
		b, err := ReceiveBuffer(ctx, far, d, ImportOptions{})
		if err == nil {
			err = b.Close()
		}
		return err
	}
	for _, c := range []struct {
		name string
		send func() error
		want error
	}{
		{"its view", func() error { return SendBuffer(ctx, near, closed) }, cuda.ErrClosed},
		{"its handle types", func() error { return SendBuffer(ctx, near, private) }, cuda.ErrNotSupported},
		{"its description", func() error {
			defer m.Inject(sim.Fault{Call: "cuMemGetAllocationPropertiesFromHandle", Result: cuda.Code(driver.OutOfMemory)})()
			return SendBuffer(ctx, near, unknown)
		}, cuda.ErrOutOfMemory},
		{"its turn", func() error { return SendBuffer(over, near, good) }, context.Canceled},
		{"its message", func() error { return inside(t, near).offer(ctx, "test", &Descriptor{}, nil) }, ErrDescriptor},
		{"its sending", func() error { return inside(t, near).offer(over, "test", &offered, nil) }, context.Canceled},
	} {
		t.Run(c.name, func(t *testing.T) {
			refused := func(sent, received error) {
				t.Helper()
				require.ErrorIs(t, sent, c.want)
				require.NotErrorIs(t, sent, peer.ErrRefused)
				require.ErrorIs(t, received, peer.ErrRefused)
				require.ErrorContains(t, received, sent.Error())
			}
			for range 300 {
				received := make(chan error, 1)
				go func() { received <- receive() }()
				refused(c.send(), <-received)
			}
			refused(c.send(), receive())
			// An offer waits behind the reason.
			failed := c.send()
			sent := make(chan error, 1)
			go func() { sent <- SendBuffer(ctx, near, good) }()
			refused(failed, receive())
			require.NoError(t, receive())
			require.NoError(t, <-sent)
		})
	}
}

// A sender that fails and closes at once is not only gone: its reason arrives.
func TestTheReasonOfASenderThatClosesAtOnce(t *testing.T) {
	_, s := sim.Open(t)
	d := s.Devices()[0]
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 2 << 20})
	require.NoError(t, err)
	require.NoError(t, b.Close())
	for range 300 {
		near, far := peertest.Pair(t, peer.Options{})
		received := make(chan error, 1)
		go func() {
			_, err := ReceiveBuffer(peertest.Context(t), far, d, ImportOptions{})
			received <- err
		}()
		require.ErrorIs(t, SendBuffer(t.Context(), near, b), cuda.ErrClosed)
		require.NoError(t, near.Close())
		require.ErrorIs(t, <-received, peer.ErrRefused)
		require.NoError(t, far.Close())
	}
}

// A sender whose context ends while another transfer runs waits no longer.
func TestASenderThatHasNoTurnIsSilent(t *testing.T) {
	h := newHostile(t, peertest.Guard)
	in := inside(t, h.near)
	require.True(t, in.offering.Try())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	reason := errors.New("no")
	require.Equal(t, reason, in.refuse(ctx, "test", reason))
	in.offering.Give()
	require.Zero(t, in.out.begun)
}

// A number that did not reach the peer, which does not read, is that of the next transfer.
func TestAReasonThatDoesNotReachThePeer(t *testing.T) {
	h := newHostile(t, 100*time.Millisecond)
	messages := 0
	for ; ; messages++ {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		err := h.near.Send(ctx, peer.Message{Kind: 1, Body: make([]byte, 30<<10)})
		cancel()
		if err != nil {
			require.ErrorIs(t, err, peer.ErrTimeout)
			break
		}
	}
	reason := errors.New("no")
	in := inside(t, h.near)
	require.Equal(t, reason, in.refuse(t.Context(), "test", reason))
	require.Zero(t, in.out.begun)
	for range messages {
		_, err := h.far.Receive(t.Context())
		require.NoError(t, err)
	}
	require.Equal(t, reason, in.refuse(t.Context(), "test", reason))
	_, err := ReceiveBuffer(peertest.Context(t), h.far, h.d, ImportOptions{})
	require.ErrorIs(t, err, peer.ErrRefused)
}

// The example of a withdrawal is one before the offer, on a new connection.
func TestTheVectorOfAWithdrawalBeforeTheOffer(t *testing.T) {
	for _, v := range vectors.Read(t).Messages {
		if v.Kind != wire.Withdrawn {
			continue
		}
		h := newHostile(t, peertest.Guard)
		body, err := hex.DecodeString(v.Body)
		require.NoError(t, err)
		h.send(peer.Message{Kind: v.Kind, Body: body})
		_, err = ReceiveBuffer(peertest.Context(t), h.far, h.d, ImportOptions{})
		require.ErrorIs(t, err, peer.ErrRefused)
		require.ErrorContains(t, err, v.Fields["reason"].(string))
		return
	}
	require.Fail(t, "no vector of a withdrawal")
}

// Of a flood of withdrawals one is kept, and with it an offer behind it.
func TestAFloodOfWithdrawals(t *testing.T) {
	b := newInbox()
	defer b.Discard()
	const flood = 10_000
	for n := range uint32(flood) {
		if n%2 == 1 {
			require.NoError(t, b.put(someOffer(t, n+1)))
		}
		require.NoError(t, b.put(failed(wire.Withdrawn, n+1, errors.New("no")).pack()))
		require.Empty(t, b.in.open)
		require.Equal(t, n+1, b.in.refused.transfer)
	}
	require.NoError(t, b.put(someOffer(t, flood+1)))
	require.NotNil(t, b.in.refused)
	require.EqualValues(t, flood+1, b.offeredLocked().number)
	require.ErrorIs(t, b.put(failed(wire.Withdrawn, flood+2, errors.New("no")).pack()), peer.ErrProtocol)
}
