package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/stretchr/testify/require"
)

// oneOutcome requires the same error of all ranks: text, ranks and kind.
func oneOutcome(t *testing.T, errs []error) {
	t.Helper()
	var first *Error
	require.ErrorAs(t, errs[0], &first)
	for r, err := range errs {
		var e *Error
		require.ErrorAs(t, err, &e, "rank %d", r)
		require.Equal(t, [2]any{first.Error(), first.kind}, [2]any{e.Error(), e.kind}, "rank %d", r)
		require.Equal(t, first.Ranks, e.Ranks, "rank %d", r)
	}
}

// gate is a transport that delivers nothing until it is opened.
type gate struct {
	Transport
	open chan struct{}
}

func (g gate) Next(ctx context.Context) (Event, error) {
	select {
	case <-g.open:
		return g.Transport.Next(ctx)
	case <-ctx.Done():
		return Event{}, ctx.Err()
	}
}

// die ends a rank without its leaving.
func (g *Group) die() {
	switch t := g.transport.(type) {
	case *memberTransport:
		_ = t.conn.Close()
	case *localTransport:
		_ = t.tell(Event{Kind: Lost, Rank: t.rank, Reason: "its process is gone"})
	}
}

// A rank that dies after all have arrived at a step, and is missed by one rank in
// the next step, is named by all in that step; and a rank that has yet to read
// the first step still gets it complete.
func TestNoRankBlamesTheMessenger(t *testing.T) {
	each(t, 3, Options{}, func(t *testing.T, groups []*Group) {
		slow := gate{groups[1].transport, make(chan struct{})}
		groups[1].transport = slow
		first := make(chan error, 1)
		go func() { first <- groups[1].Barrier(t.Context(), "zero") }()
		for _, err := range together([]*Group{groups[0], groups[2]}, func(g *Group) error { return g.Barrier(t.Context(), "zero") }) {
			require.NoError(t, err)
		}
		groups[2].die()
		errs := []error{groups[0].Barrier(t.Context(), "one"), nil}
		require.ErrorIs(t, errs[0], peer.ErrGone)
		require.ErrorContains(t, errs[0], "rank 2")
		close(slow.open)
		require.NoError(t, <-first, "all had arrived")
		errs[1] = groups[1].Barrier(t.Context(), "one")
		oneOutcome(t, errs)
	})
}

// A rank whose limit ends while the step is complete, but not yet read, has it
// complete, and the group goes on.
func TestACompleteStepIsNeverLate(t *testing.T) {
	each(t, 2, Options{}, func(t *testing.T, groups []*Group) {
		slow := gate{groups[1].transport, make(chan struct{})}
		groups[1].transport = slow
		ctx, cancel := context.WithCancel(t.Context())
		first := make(chan error, 1)
		go func() { first <- groups[1].Barrier(ctx, "zero") }()
		require.NoError(t, groups[0].Barrier(t.Context(), "zero"))
		time.AfterFunc(10*time.Millisecond, func() { close(slow.open) })
		cancel()
		require.NoError(t, <-first)
		for _, err := range together(groups, func(g *Group) error { return g.Barrier(t.Context(), "one") }) {
			require.NoError(t, err)
		}
	})
}

// However a group ends, all ranks that live complete the same
// steps and then return the same error.
func TestOneOutcomeForAll(t *testing.T) {
	for round := range killRounds(40) {
		each(t, 4, Options{}, func(t *testing.T, groups []*Group) {
			random := rand.New(rand.NewPCG(uint64(round), 4))
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			victim := groups[1+random.IntN(3)]
			died := false
			end := []func(){
				func() { died = true; victim.die() },
				cancel, // for one rank alone
				func() { victim.Fail(errors.New("no memory")) },
				func() { died = true; _ = victim.Close() },
			}[round%4]
			var ending sync.WaitGroup
			ending.Add(1)
			time.AfterFunc(time.Duration(random.IntN(3000))*time.Microsecond, func() { end(); ending.Done() })
			steps := make([]int, len(groups))
			errs := together(groups, func(g *Group) (err error) {
				own := t.Context()
				if g == victim {
					own = ctx
				}
				for ; err == nil; steps[g.Rank()]++ {
					err = g.Barrier(own, fmt.Sprint("step ", steps[g.Rank()]))
				}
				return err
			})
			ending.Wait()
			var done []int
			var all []error
			for r, g := range groups {
				if g != victim || !died {
					done, all = append(done, steps[r]), append(all, errs[r])
				}
			}
			for _, n := range done {
				require.Equal(t, done[0], n, "round %d: %v: %v", round, steps, errs)
			}
			oneOutcome(t, all)
			var e *Error
			require.ErrorAs(t, all[0], &e)
			require.Equal(t, []int{victim.Rank()}, e.Ranks)
			if died {
				require.ErrorIs(t, e, peer.ErrGone)
			}
		})
	}
}

// If a rank dies after it has arrived, and another rank needs its memory for the same step,
// the error names the rank that died, not the one that noticed.
func TestARankThatDiesAfterItArrived(t *testing.T) {
	each(t, 3, Options{}, func(t *testing.T, groups []*Group) {
		errs := make(chan error, 1)
		go func() { errs <- groups[0].Barrier(t.Context(), "import") }()
		go func() {
			_ = groups[2].transport.Post(t.Context(), Step{0, "import"}, Contribution{})
			groups[2].die()
		}()
		met := errors.New("the memory is gone")
		mine := groups[1].failAt("import", met)
		require.ErrorIs(t, mine, met)
		require.ErrorIs(t, mine, peer.ErrGone)
		var e *Error
		require.ErrorAs(t, mine, &e)
		oneOutcome(t, []error{e, <-errs})
		require.Equal(t, []int{2}, e.Ranks)
	})
}
