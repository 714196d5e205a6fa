//go:build linux

package publish

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/sharedpage"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// villain is a follower by hand, which writes what it likes into its slot.
type villain struct {
	conn  *peer.Conn
	to    token
	words func(slotWord, uint64)
}

// invade follows by hand, and has the first view carried out.
func (v *victim) invade() *villain {
	v.Helper()
	c := v.dial()
	require.NoError(v, c.Send(peertest.Context(v), pack(&follow{number: 1, access: WriteAccess, name: "numbers"})))
	m := v.receive(c)
	said, err := toClient(m.Kind, m.Body, len(m.FDs))
	require.NoError(v, err)
	in := said.(*accepted)
	var page *sharedpage.Page
	require.NoError(v, m.FDs[0].Use(func(n int) (err error) {
		page, err = sharedpage.Open(n)
		return err
	}))
	link.Of(m.FDs[0]).SetForeign(false)
	require.NoError(v, m.Close())
	v.Cleanup(func() { require.NoError(v, page.Close()) })
	m = v.receive(c)
	said, err = toClient(m.Kind, m.Body, len(m.FDs))
	require.NoError(v, err)
	u := said.(*update)
	require.NoError(v, peer.CloseAll(m.FDs))
	require.NoError(v, c.Send(peertest.Context(v), pack(&done{in.token, u.serial, statusOK, uint32(len(u.chunks)), ""})))
	require.NoError(v, v.p.Settle(peertest.Context(v)))
	slot := &pageSlot{page: page, index: int(in.slot)}
	return &villain{c, in.token, func(w slotWord, n uint64) { slot.word(w).Store(n) }}
}

// Followers that never release, that release what they have not, or that write anything into
// their page hurt themselves alone: an honest follower reads whole versions and proves them, and the publisher
// waits for it, and goes on without the others.
func TestHostileReadersHurtThemselvesAlone(t *testing.T) {
	any := func() uint64 {
		return []uint64{0, 1, rand.Uint64N(100), rand.Uint64(), release, release - 1, cutLeft, cutWithdrawn, 1 << 63, ^uint64(0)}[rand.IntN(10)]
	}
	for what, hostile := range map[string]struct {
		does     func(v *villain)
		excluded bool
	}{
		"it never releases":            {func(v *villain) { v.words(heldWord, 1) }, true},
		"it releases what it has not":  {func(v *villain) { v.words(heldWord, 1); v.words(releasedWord, 1<<62) }, false},
		"it released less than it had": {func(v *villain) { v.words(heldWord, 5); v.words(releasedWord, 4) }, true},
		"it holds beyond all numbers":  {func(v *villain) { v.words(heldWord, 1<<63) }, true},
		"it says that nothing is so": {func(v *villain) {
			v.words(intentWord, 0)
			v.words(fluxWord, 0)
			v.words(cutWord, 0)
			v.words(completeWord, 0)
		}, false},
		"it says that all was rewritten": {func(v *villain) { v.words(intentWord, release); v.words(fluxWord, release) }, false},
	} {
		t.Run(what, func(t *testing.T) {
			v := newVictim(t, ServerOptions{}, peer.Options{})
			evil := v.invade()
			s, ctx := newStream(t, v.dev), peertest.Context(t)
			hostile.does(evil)
			excluded := 0
			for version := range byte(3) {
				held := v.honest.Generation()
				require.True(t, v.honest.Intact(held))
				briefly, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
				require.ErrorIs(t, v.p.Rewrite(briefly, RewriteOptions{}), peer.ErrTimeout, "the honest one holds")
				cancel()
				require.True(t, v.honest.Intact(held))
				require.NoError(t, v.honest.Release())
				require.NoError(t, v.p.Rewrite(ctx, RewriteOptions{ExcludeAfter: 300 * time.Millisecond, Excluded: func(f FollowerStats) {
					excluded++
					hostile.does(evil) // as if it had not heard
				}}))
				require.NoError(t, s.Memset(v.array.Ptr(), version, 4*v.array.Len()))
				require.NoError(t, v.p.Announce(ctx, v.array.Len(), s))
				for v.honest.Generation() < v.p.Stats().Generation {
					require.NoError(t, v.honest.Next(ctx))
				}
				v.reads(version)
			}
			require.Equal(t, hostile.excluded, excluded == 1)
			if hostile.excluded {
				for {
					m := v.receive(evil.conn)
					said, err := toClient(m.Kind, m.Body, len(m.FDs))
					require.NoError(t, err)
					require.NoError(t, m.Close())
					if e, ok := said.(*ended); ok {
						require.Equal(t, statusExcluded, e.status)
						break
					}
				}
			}
			v.served()
		})
	}
	t.Run("it writes anything", func(t *testing.T) {
		v := newVictim(t, ServerOptions{}, peer.Options{})
		ctx, cancel := context.WithCancel(peertest.Context(t))
		var writing sync.WaitGroup
		defer writing.Wait()
		defer cancel()
		for range 3 {
			evil := v.invade()
			writing.Go(func() {
				for ctx.Err() == nil {
					evil.words(slotWord(rand.IntN(slotWords)), any())
					time.Sleep(50 * time.Microsecond)
				}
			})
		}
		s := newStream(t, v.dev)
		for version := range byte(4) {
			require.NoError(t, v.honest.Release())
			require.NoError(t, v.p.Rewrite(ctx, RewriteOptions{ExcludeAfter: time.Second}))
			require.NoError(t, s.Memset(v.array.Ptr(), version, 4*v.array.Len()))
			require.NoError(t, v.p.Announce(ctx, v.array.Len(), s))
			for v.honest.Generation() < v.p.Stats().Generation {
				require.NoError(t, v.honest.Next(ctx))
			}
			v.reads(version)
		}
		v.served()
	})
}

// reads requires that the honest follower reads a version, and proves it.
func (v *victim) reads(version byte) {
	v.Helper()
	got := make([]uint32, v.honest.Len())
	require.NoError(v, v.honest.Array().All().CopyTo(nil, got))
	require.True(v, v.honest.Intact(v.honest.Generation()))
	for _, e := range got {
		require.Equal(v, uint32(version)*0x01010101, e)
	}
}
