package budget_test

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/budget"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func account(b *budget.Budget, name string) *budget.Account {
	return b.Account(life.KindBuffer, life.Label{Name: name}, func() uint64 { return 0 })
}

// A tree of budgets behaves as sums over its accounts, to the byte.
func TestBudgetsAreSums(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type node struct {
			b      *budget.Budget
			parent int // -1: none
			limit  uint64
			peak   uint64
		}
		var nodes []*node
		for i := range rapid.IntRange(1, 5).Draw(t, "budgets") {
			n := &node{parent: rapid.IntRange(-1, i-1).Draw(t, "parent"), limit: rapid.Uint64Range(0, 100).Draw(t, "limit")}
			var parent *budget.Budget
			if n.parent >= 0 {
				parent = nodes[n.parent].b
			}
			n.b = budget.New("", n.limit, parent, nil)
			nodes = append(nodes, n)
		}
		type holder struct {
			a  *budget.Account
			at int
			n  uint64
		}
		var all []*holder
		for range rapid.IntRange(1, 6).Draw(t, "accounts") {
			at := rapid.IntRange(0, len(nodes)-1).Draw(t, "of")
			all = append(all, &holder{a: account(nodes[at].b, ""), at: at})
		}
		levels := func(at int) (up []int) {
			for ; at >= 0; at = nodes[at].parent {
				up = append(up, at)
			}
			return up
		}
		sum := func(i int) (n uint64, of []uint64) {
			for _, h := range all {
				if h.n > 0 && slices.Contains(levels(h.at), i) {
					n += h.n
					of = append(of, h.n)
				}
			}
			slices.SortFunc(of, func(a, b uint64) int { return int(b) - int(a) })
			return n, of
		}
		t.Repeat(map[string]func(*rapid.T){
			"charge": func(t *rapid.T) {
				h, n := rapid.SampledFrom(all).Draw(t, "account"), rapid.Uint64Range(1, 120).Draw(t, "bytes")
				fits := true
				for _, i := range levels(h.at) {
					had, _ := sum(i)
					fits = fits && (nodes[i].limit == 0 || had+n <= nodes[i].limit)
				}
				require.Equal(t, fits, n <= h.a.Remaining())
				err := h.a.Charge(n)
				require.Equal(t, fits, err == nil)
				if !fits {
					var s *budget.Shortage
					require.ErrorAs(t, err, &s)
					require.False(t, s.Fits())
					return
				}
				h.n += n
				for _, i := range levels(h.at) {
					had, _ := sum(i)
					nodes[i].peak = max(nodes[i].peak, had)
				}
			},
			"credit": func(t *rapid.T) {
				h := rapid.SampledFrom(all).Draw(t, "account")
				if h.n == 0 {
					t.Skip("nothing to credit")
				}
				n := rapid.Uint64Range(1, h.n).Draw(t, "bytes")
				h.a.Credit(n)
				h.n -= n
			},
			"limit": func(t *rapid.T) {
				n := rapid.SampledFrom(nodes).Draw(t, "budget")
				n.limit = rapid.Uint64Range(0, 100).Draw(t, "limit")
				n.b.SetLimit(n.limit)
			},
			"": func(t *rapid.T) {
				for i, n := range nodes {
					st := n.b.Stats()
					committed, of := sum(i)
					require.Equal(t, []uint64{n.limit, committed, n.peak}, []uint64{st.Limit, st.Committed, st.Peak})
					var got []uint64
					for _, u := range st.Holders {
						got = append(got, u.Committed)
					}
					require.Equal(t, of, got)
				}
			},
		})
	})
}

// Goroutines that charge two levels at once never exceed either limit, and leave nothing.
func TestBudgetsAreExactUnderGoroutines(t *testing.T) {
	const goroutines, rounds, limit, inner = 16, 2000, 1000, 300
	top := budget.New("top", limit, nil, nil)
	below := []*budget.Budget{budget.New("a", inner, top, nil), budget.New("b", inner, top, nil), top}
	var have atomic.Int64
	var refused atomic.Int64
	stop, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		for {
			for i, b := range below {
				st := b.Stats()
				var sum uint64
				for _, h := range st.Holders {
					sum += h.Committed
				}
				if sum != st.Committed || st.Committed > []uint64{inner, inner, limit}[i] {
					t.Errorf("budget %d has %d committed, and accounts of %d", i, st.Committed, sum)
					return
				}
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	}()
	var all sync.WaitGroup
	for g := range goroutines {
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			a := account(below[g%len(below)], "")
			var held []uint64
			for range rounds {
				if n := r.Uint64N(100) + 1; r.IntN(2) == 0 {
					if err := a.Charge(n); err == nil {
						held = append(held, n)
						have.Add(int64(n))
					} else if s := new(budget.Shortage); errors.As(err, &s) {
						refused.Add(1)
					}
				} else if len(held) > 0 {
					last := len(held) - 1
					have.Add(-int64(held[last]))
					a.Credit(held[last])
					held = held[:last]
				}
			}
			for _, n := range held {
				a.Credit(n)
			}
		})
	}
	all.Wait()
	close(stop)
	<-watched
	require.Positive(t, refused.Load(), "the limits were never reached")
	for _, b := range below {
		st := b.Stats()
		require.Zero(t, st.Committed)
		require.Empty(t, st.Holders)
	}
}

func shortage(t *testing.T, a *budget.Account, n uint64) *budget.Shortage {
	t.Helper()
	var s *budget.Shortage
	require.ErrorAs(t, a.Charge(n), &s)
	return s
}

func call(f func()) { f() }

// Owners are asked by priority, within the budget that refused alone, and no more than needed.
func TestOwnersAreAskedInOrder(t *testing.T) {
	top := budget.New("top", 100, nil, nil)
	low, other := budget.New("low", 50, top, nil), budget.New("other", 0, top, nil)
	a, b := account(low, "a"), account(other, "b")
	require.NoError(t, a.Charge(50))
	require.NoError(t, b.Charge(50))
	var asked []string
	ask := func(b *budget.Budget, priority int, name string, free func(need uint64) uint64) func() {
		return b.OnPressure(priority, func(need uint64) uint64 {
			asked = append(asked, name)
			return free(need)
		})
	}
	nothing := func(uint64) uint64 { return 0 }
	ask(top, 5, "last", nothing)
	ask(low, 1, "low", func(need uint64) uint64 { a.Credit(need); return need })
	ask(other, 0, "other", nothing)
	gone := ask(low, 0, "gone", nothing)
	ask(low, 1, "low too", nothing)
	gone()
	gone()

	s := shortage(t, a, 10) // of low
	s.Ask(call)
	require.Equal(t, []string{"low"}, asked)
	require.True(t, s.Fits())
	require.NoError(t, a.Charge(10))

	asked = nil
	s = shortage(t, b, 10) // of top
	s.Ask(call)
	require.Equal(t, []string{"other", "low"}, asked)
	require.True(t, s.Fits())

	asked = nil
	s = shortage(t, b, 100)
	ask(top, -1, "promises", func(uint64) uint64 { return 1000 })
	s.Ask(call)
	require.Equal(t, []string{"promises"}, asked, "which is to come")
	require.False(t, s.Fits())
}

// An owner that makes memory of the budget while it is asked is not asked again.
func TestAnOwnerIsNotAskedAgain(t *testing.T) {
	b := budget.New("", 10, nil, nil)
	a := account(b, "")
	require.NoError(t, a.Charge(10))
	asked := 0
	b.OnPressure(0, func(uint64) uint64 {
		asked++
		var s *budget.Shortage
		require.ErrorAs(t, a.Charge(1), &s)
		s.Ask(call)
		require.False(t, s.Fits())
		return 0
	})
	shortage(t, a, 1).Ask(call)
	require.Equal(t, 1, asked)
}

// What an owner gives back at once is not expected to come, too.
func TestWhatWasCreditedIsNotComing(t *testing.T) {
	b := budget.New("", 10, nil, nil)
	a := account(b, "")
	require.NoError(t, a.Charge(10))
	b.OnPressure(0, func(uint64) uint64 { a.Credit(2); return 2 })
	asked := uint64(0)
	b.OnPressure(1, func(need uint64) uint64 {
		asked = need
		a.Credit(need)
		return need
	})
	s := shortage(t, a, 4)
	s.Ask(call)
	require.EqualValues(t, 2, asked)
	require.True(t, s.Fits())
}

func TestCreditOfNothingPanics(t *testing.T) {
	a := account(budget.New("", 0, nil, nil), "")
	require.NoError(t, a.Charge(1))
	require.Panics(t, func() { a.Credit(2) })
}

// A refusal names the level, what it has, who has that, and what to do.
func TestARefusalSaysWhoHasTheMemory(t *testing.T) {
	b := budget.New("llm", 100, nil, nil)
	for i, n := range []uint64{30, 20, 10, 9, 8, 7, 6} {
		a := b.Account(life.KindPool, life.Label{Name: string(rune('a' + i)), Tag: "x"}, nil)
		require.NoError(t, a.Charge(n))
	}
	f := shortage(t, account(b, ""), 11).Failure("op")
	require.Equal(t, `11 bytes of budget "llm", which has 90 bytes of 100 bytes committed: pool "a" tagged "x" 30 bytes, pool "b" tagged "x" 20 bytes, `+
		`pool "c" tagged "x" 10 bytes, pool "d" tagged "x" 9 bytes, pool "e" tagged "x" 8 bytes, 2 more 13 bytes`, f.Asked)
	require.Contains(t, f.Hint, "Budget.SetLimit")
	f = shortage(t, account(b, ""), 101).Failure("op")
	require.Contains(t, f.Hint, "alone exceeds")
}

// A budget that the program cannot reach any more is not among All.
func TestBudgetsThatAreReachable(t *testing.T) {
	has := func(serial int64) bool {
		return slices.ContainsFunc(budget.All(), func(b *budget.Budget) bool { return b.Serial == serial })
	}
	parent := budget.New("", 0, nil, nil).Serial
	b := budget.New("b", 10, budget.New("parent", 0, nil, nil), nil)
	require.True(t, has(b.Serial))
	require.Eventually(t, func() bool { runtime.GC(); return !has(parent) }, time.Minute, time.Millisecond)
	require.True(t, has(b.Parent().Serial), "its child is")
	serial := b.Serial
	runtime.KeepAlive(b)
	require.Eventually(t, func() bool { runtime.GC(); return !has(serial) && !has(serial-1) }, time.Minute, time.Millisecond)
}
