//go:build linux

package broker

import (
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

// A client that lost its connection while its memory is made, and asks again on another one, gets that.
func TestAClientThatAsksAgainWhileItsMemoryIsMade(t *testing.T) {
	for kind, name := range map[uint16]string{wire.BrokerCreate: "create", wire.BrokerKeep: "keep"} {
		t.Run(name, func(t *testing.T) {
			peertest.NoLeak(t)
			m, sys := sim.Open(t, sim.Options{})
			d := sys.Devices()[0]
			b, err := New(t.Context(), sys, Options{})
			require.NoError(t, err)
			making, lost := make(chan struct{}), make(chan struct{})
			var once sync.Once
			m.OnCall(func(call string) {
				if call == "cuMemCreate" {
					once.Do(func() {
						close(making)
						<-lost
					})
				}
			})
			first := against(t, b, false)
			r := request{kind: kind, number: 7, key: keeper.Key{1}, name: "w", device: d.UUID(), bytes: 1 << 20}
			first.send(r.pack())
			<-making
			second := against(t, b, false)
			require.NoError(t, first.c.Close())
			time.AfterFunc(20*time.Millisecond, func() { close(lost) })
			got := second.ask(r)
			require.Equal(t, wire.BrokerObject, got.kind)
			if got.beside != nil {
				require.NoError(t, got.beside.Close())
			}
			memory, err := handles.ReceiveBuffer(peertest.Context(t), second.c, d, handles.ImportOptions{})
			require.NoError(t, err)
			require.NoError(t, memory.Close())
			require.Equal(t, wire.BrokerDone, second.ask(request{kind: wire.BrokerRelease, key: r.key}).kind)
			require.NoError(t, second.c.Close())
			require.NoError(t, <-first.ended)
			require.NoError(t, <-second.ended)
			require.NoError(t, b.Close())
		})
	}
}

// A publisher that cannot be watched and that asks again, because it did not learn the outcome, is connected. What is
// being made is awaited, also once its client has given it back.
func TestWhoIsAwaited(t *testing.T) {
	b, r := newBooks(0), record{Name: "w", Writer: id(1)}
	asked := request{key: keeper.Key{1}, name: "w", device: cuda.UUID{1}, bytes: 10}
	o, err := b.keep("test", &asked, r, []int{10}, Quota{})
	require.NoError(t, err)
	o.making, o.Free = true, true
	other := asked
	other.key = keeper.Key{2}
	_, err = b.keep("test", &other, record{Name: "w", Writer: id(2)}, []int{10}, Quota{})
	require.ErrorIs(t, err, ErrWriting)
	require.Equal(t, 1, b.writers("w"))
	o.making, o.Free, o.unseen = false, false, true
	o.memory = handles.Descriptor{Device: asked.device, Length: 10}
	require.Zero(t, b.writers("w"))
	_, err = b.keep("test", &asked, r, []int{10}, Quota{})
	require.NoError(t, err)
	_, err = b.keep("test", &other, record{Name: "w", Writer: id(2)}, []int{10}, Quota{})
	require.ErrorIs(t, err, ErrWriting, "its process is there")
	require.Equal(t, 1, b.writers("w"))
}
