package managed_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestAdviceIsReadBackFromTheDriver(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		b, s := buffer(t, d, 4*mib), stream(t, d)
		here := d.Location()
		nothing := func(r managed.Range) {
			t.Helper()
			mostly, err := r.ReadMostly()
			require.NoError(t, err)
			require.False(t, mostly)
			for _, read := range []func() (cuda.Location, error){r.Preferred, r.LastPrefetch} {
				l, err := read()
				require.NoError(t, err)
				require.Zero(t, l)
			}
			all, err := r.AccessedBy().All()
			require.NoError(t, err)
			require.Empty(t, all)
		}
		nothing(b.Range)

		half, err := b.Slice(0, 2*mib)
		require.NoError(t, err)
		require.Equal(t, b.Ptr(), half.Ptr())
		require.Equal(t, 2*mib, half.Len())
		other, err := b.Slice(2*mib, 4*mib)
		require.NoError(t, err)
		require.NoError(t, half.SetReadMostly(true))
		require.NoError(t, half.SetPreferred(here))
		require.NoError(t, half.AccessedBy().Add(cuda.OnHost()))
		require.NoError(t, half.Prefetch(s, here))
		require.NoError(t, s.Synchronize())

		// The half has it all; the whole, and the other half, read as without.
		nothing(b.Range)
		nothing(other)
		mostly, err := half.ReadMostly()
		require.NoError(t, err)
		require.True(t, mostly)
		for _, read := range []func() (cuda.Location, error){half.Preferred, half.LastPrefetch} {
			l, err := read()
			require.NoError(t, err)
			require.Equal(t, here, l)
		}
		all, err := half.AccessedBy().All()
		require.NoError(t, err)
		require.Equal(t, []cuda.Location{cuda.OnHost()}, all)

		require.NoError(t, half.SetReadMostly(false))
		require.NoError(t, half.SetPreferred(cuda.Location{}))
		require.NoError(t, b.AccessedBy().Remove(cuda.OnHost()), "over the whole, of which half has it")
		mostly, err = half.ReadMostly()
		require.NoError(t, err)
		require.False(t, mostly)
		l, err := half.Preferred()
		require.NoError(t, err)
		require.Zero(t, l)
		all, err = half.AccessedBy().All()
		require.NoError(t, err)
		require.Empty(t, all)
	})
}

// The driver does not report a preferred node; what was preferred before it must
// not be reported in its place.
func TestAPreferredNodeReplacesWhatWasPreferred(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		b := buffer(t, d, mib)
		for _, before := range []cuda.Location{{}, d.Location(), cuda.OnHost()} {
			for _, node := range []cuda.Location{cuda.OnHostNUMA(0), cuda.OnCurrentNUMA()} {
				require.NoError(t, b.SetPreferred(before))
				require.NoError(t, b.SetPreferred(node))
				l, err := b.Preferred()
				require.NoError(t, err)
				require.Zero(t, l, "%v after %v", node, before)
			}
		}
	})
}

func TestAccessedByIsASet(t *testing.T) {
	m, d := open(t, devices(3))
	b := buffer(t, d, mib)
	set := b.AccessedBy()
	requireSet := func(want ...cuda.Location) {
		t.Helper()
		all, err := set.All()
		require.NoError(t, err)
		require.Equal(t, want, all)
	}
	require.NoError(t, set.Add(cuda.OnDevice(2)))
	require.NoError(t, set.Add(cuda.OnHost()))
	require.NoError(t, set.Add(cuda.OnDevice(2)))
	requireSet(cuda.OnHost(), cuda.OnDevice(2))
	in, err := set.Contains(cuda.OnDevice(1))
	require.NoError(t, err)
	require.False(t, in)

	// Only what differs is sent, however often it is named.
	m.ResetCounts()
	require.NoError(t, set.Assign(cuda.OnDevice(2), cuda.OnDevice(0), cuda.OnDevice(0), cuda.OnHost()))
	require.Equal(t, 1, m.Count("cuMemAdvise"))
	requireSet(cuda.OnHost(), cuda.OnDevice(0), cuda.OnDevice(2))
	m.ResetCounts()
	require.NoError(t, set.Assign(cuda.OnDevice(1), cuda.OnDevice(2)))
	require.Equal(t, 3, m.Count("cuMemAdvise"))
	requireSet(cuda.OnDevice(1), cuda.OnDevice(2))

	// All is checked before anything is sent.
	m.ResetCounts()
	for _, l := range []cuda.Location{cuda.OnHostNUMA(0), cuda.OnCurrentNUMA(), cuda.OnDevice(3), {}} {
		require.ErrorIs(t, set.Assign(cuda.OnHost(), l), cuda.ErrInvalidArgument)
	}
	require.Zero(t, m.Count("cuMemAdvise"))
	requireSet(cuda.OnDevice(1), cuda.OnDevice(2))

	require.NoError(t, set.Assign())
	requireSet()
}

// A set that fails to be assigned in the middle is what it was, whichever call
// it was that failed.
func TestAFailedAssignmentChangesNothing(t *testing.T) {
	m, d := open(t, devices(4))
	b := buffer(t, d, mib)
	before := []cuda.Location{cuda.OnHost(), cuda.OnDevice(1)}
	after := []cuda.Location{cuda.OnDevice(0), cuda.OnDevice(2), cuda.OnDevice(3)}
	require.NoError(t, b.AccessedBy().Assign(before...))
	for _, call := range []string{"cuMemAdvise", "cuMemRangeGetAttribute"} {
		for after1 := 0; ; after1++ {
			m.ResetCounts()
			remove := m.Inject(sim.Fault{Call: call, After: after1, Result: 999})
			err := b.AccessedBy().Assign(after...)
			remove()
			if err == nil {
				require.NotZero(t, after1, "%s was never called", call)
				break
			}
			require.ErrorContains(t, err, call)
			all, err := b.AccessedBy().All()
			require.NoError(t, err)
			require.Equal(t, before, all, "%s failed after %d", call, after1)
		}
		require.NoError(t, b.AccessedBy().Assign(before...))
	}
	// Where the undo fails too, once, it is tried again; twice, the error says so.
	for times, kept := range map[int]int{2: 0, 3: 1} {
		remove := m.Inject(sim.Fault{Call: "cuMemAdvise", After: 1, Times: times, Result: 999})
		err := b.AccessedBy().Assign(after...)
		remove()
		all, readErr := b.AccessedBy().All()
		require.NoError(t, readErr)
		require.Len(t, all, len(before)+kept)
		require.Equal(t, kept == 1, strings.Contains(err.Error(), "keeps a change"))
		require.NoError(t, b.AccessedBy().Assign(before...))
	}
}

// Advice on ranges against a model that keeps it page by page.
func TestAdviceAgainstAModel(t *testing.T) {
	const count, pages, page = 3, 12, 64 << 10 // a multiple of any system's page
	type state struct {
		mostly              bool
		preferred, prefetch cuda.Location
		by                  [count + 1]bool
	}
	rapid.Check(t, func(t *rapid.T) {
		m, err := sim.New(devices(count))
		require.NoError(t, err)
		sys, err := m.OpenOwned(cuda.Options{})
		require.NoError(t, err)
		d := sys.Devices()[0]
		b, err := managed.New(d, pages*page, managed.Options{})
		require.NoError(t, err)
		defer func() {
			require.NoError(t, b.Close())
			require.NoError(t, sys.Close())
		}()
		var model [pages]state
		places := []cuda.Location{cuda.OnHost(), cuda.OnDevice(0), cuda.OnDevice(1), cuda.OnDevice(2)}
		some := func(t *rapid.T) (managed.Range, []state) {
			lo := rapid.IntRange(0, pages-1).Draw(t, "first")
			n := rapid.IntRange(1, pages-lo).Draw(t, "pages")
			r, err := b.Slice(lo*page, (lo+n)*page)
			require.NoError(t, err)
			return r, model[lo : lo+n]
		}
		at := func(t *rapid.T) int { return rapid.IntRange(0, len(places)-1).Draw(t, "place") }
		t.Repeat(map[string]func(*rapid.T){
			"read mostly": func(t *rapid.T) {
				r, in := some(t)
				v := rapid.Bool().Draw(t, "on")
				require.NoError(t, r.SetReadMostly(v))
				for i := range in {
					in[i].mostly = v
				}
			},
			"preferred": func(t *rapid.T) {
				r, in := some(t)
				l := rapid.SampledFrom(append(places, cuda.Location{})).Draw(t, "to")
				require.NoError(t, r.SetPreferred(l))
				for i := range in {
					in[i].preferred = l
				}
			},
			"add": func(t *rapid.T) {
				r, in := some(t)
				p := at(t)
				require.NoError(t, r.AccessedBy().Add(places[p]))
				for i := range in {
					in[i].by[p] = true
				}
			},
			"remove": func(t *rapid.T) {
				r, in := some(t)
				p := at(t)
				require.NoError(t, r.AccessedBy().Remove(places[p]))
				for i := range in {
					in[i].by[p] = false
				}
			},
			"prefetch": func(t *rapid.T) {
				r, in := some(t)
				p := at(t)
				require.NoError(t, r.Prefetch(nil, places[p]))
				for i := range in {
					in[i].prefetch = places[p]
				}
			},
			"": func(t *rapid.T) {
				r, in := some(t)
				mostly, err := r.ReadMostly()
				require.NoError(t, err)
				preferred, err := r.Preferred()
				require.NoError(t, err)
				prefetched, err := r.LastPrefetch()
				require.NoError(t, err)
				want := in[0]
				for _, s := range in {
					want.mostly = want.mostly && s.mostly
					if s.preferred != in[0].preferred {
						want.preferred = cuda.Location{}
					}
					if s.prefetch != in[0].prefetch {
						want.prefetch = cuda.Location{}
					}
				}
				require.Equal(t, want.mostly, mostly)
				require.Equal(t, want.preferred, preferred)
				require.Equal(t, want.prefetch, prefetched)
				for p, l := range places {
					in1, err := r.AccessedBy().Contains(l)
					require.NoError(t, err)
					require.Equal(t, !slices.ContainsFunc(in, func(s state) bool { return !s.by[p] }), in1)
				}
			},
		})
	})
}
