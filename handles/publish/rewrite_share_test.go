//go:build linux

package publish_test

import (
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// A publisher that rewrites again at once leaves each reader that waits its share of the
// generations, with few processors and with many.
func TestAPublisherInATightLoopStarvesNoReader(t *testing.T) {
	const rounds, readers, share = 80, 3, 4
	for _, processors := range []int{1, 16} {
		t.Run(fmt.Sprint(processors, " processors"), func(t *testing.T) {
			defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(processors))
			gputest.Each(t, func(t *testing.T, d *cuda.Device) {
				w := newRewritten(t, d, 1000)
				ctx := peertest.Context(t)
				var seen [readers]int
				var reading sync.WaitGroup
				for i := range seen {
					f, s := followed(t, client(t, w.path), d, publish.FollowOptions{}), stream(t, d)
					on := []*cuda.Stream{s}
					if i == 0 {
						on = nil // a reader on the host
					}
					reading.Go(func() {
						for f.Next(ctx, on...) == nil {
							if _, err := valuesOf(f, s); err != nil {
								t.Error(err)
							}
							seen[i]++
						}
					})
				}
				began := time.Now()
				for range rounds {
					require.NoError(t, w.next(ctx, publish.RewriteOptions{}, w.writer))
				}
				took := time.Since(began)
				require.NoError(t, w.p.Withdraw())
				reading.Wait()
				t.Logf("%d generations in %v, of which the readers saw %d", rounds, took.Round(time.Millisecond), seen)
				for i, n := range seen {
					require.GreaterOrEqual(t, n, rounds/share, "reader %d", i)
				}
			})
		})
	}
}

// valuesOf reads what the follower shows, and checks that it is one version.
func valuesOf(f *publish.Follower[uint32], s *cuda.Stream) (uint32, error) {
	got := make([]uint32, f.Len())
	if err := f.Array().All().CopyTo(s, got); err != nil {
		return 0, err
	}
	return versionOf(got)
}
