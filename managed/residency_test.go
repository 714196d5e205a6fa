package managed_test

import (
	"math/rand"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/stretchr/testify/require"
)

// Whatever was prefetched where, and touched or discarded since, each part is where the
// machine's books have most of its pages.
func TestResidencyIsThatOfMostPages(t *testing.T) {
	o := devices(2)
	o.DriverVersion = 13040
	m, d := open(t, o)
	b, s, r, page := buffer(t, d, 4*mib-5000), stream(t, d), rand.New(rand.NewSource(1)), int(host.PageSize())
	for range 200 {
		from := r.Intn(b.Len() - 1)
		part, err := b.Slice(from, from+1+r.Intn(b.Len()-from))
		require.NoError(t, err)
		switch to := []cuda.Location{cuda.OnHost(), cuda.OnDevice(0), cuda.OnDevice(1)}[r.Intn(3)]; r.Intn(4) {
		case 0:
			require.NoError(t, s.Memset(part.Ptr(), 1, part.Len()))
		case 1:
			require.NoError(t, part.DiscardPrefetch(s, to))
		default:
			require.NoError(t, part.Prefetch(s, to))
		}
		require.NoError(t, s.Synchronize())
		of, err := b.Slice(from/page*page, b.Len())
		require.NoError(t, err)
		size := min(of.Len(), page*(1+r.Intn(100)))
		all, err := of.Residency(size)
		require.NoError(t, err)
		require.Len(t, all, (of.Len()+size-1)/size)
		for i, l := range all {
			p, n, cut := of.Ptr()+cuda.Ptr(i*size), min(size, of.Len()-i*size), 0
			if n < size {
				cut = page - 1 // the books count bytes, the driver whole pages
			}
			sums := map[cuda.Location]int{{}: n}
			for at, device := range map[cuda.Location]int{cuda.OnHost(): -1, cuda.OnDevice(0): 0, cuda.OnDevice(1): 1} {
				sums[at] = m.Resident(p, n, device)
				sums[cuda.Location{}] -= sums[at]
			}
			for _, other := range sums {
				require.LessOrEqual(t, other, sums[l]+cut, "part %d of %d bytes is at %v: %v", i, size, l, sums)
			}
		}
	}
}

func TestResidencyNeedsADriverThatCanTell(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		b, err := managed.New(d, mib, managed.Options{})
		require.NoError(t, err)
		closed(t, b)
		_, err = b.Residency(mib)
		require.ErrorIs(t, err, cuda.ErrNotSupported)
		require.ErrorContains(t, err, "13.4")
	})
}

func TestResidencyIsChecked(t *testing.T) {
	_, d := open(t, sim.OlderDriver(13040))
	b := buffer(t, d, mib)
	for _, part := range []int{0, -1, mib + 1} {
		_, err := b.Residency(part)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	_, err := managed.Range{}.Residency(1)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	closed, err := managed.New(d, mib, managed.Options{})
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	_, err = closed.Residency(mib)
	require.ErrorIs(t, err, cuda.ErrClosed)
}
