//go:build linux

package publish_test

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// cutOff are the ends of a follower that release its streams before the publisher's work is
// done, with the reason that Err returns.
var cutOff = map[string]struct {
	end func(*publish.Follower[uint32], *publish.Client, *cuda.Stream) error
	why error
}{
	"Follower.Close":      {func(f *publish.Follower[uint32], _ *publish.Client, _ *cuda.Stream) error { return f.Close() }, cuda.ErrClosed},
	"Follower.CloseAfter": {func(f *publish.Follower[uint32], _ *publish.Client, s *cuda.Stream) error { return f.CloseAfter(s) }, cuda.ErrClosed},
	"Client.Close":        {func(_ *publish.Follower[uint32], k *publish.Client, _ *cuda.Stream) error { return k.Close() }, cuda.ErrClosed},
}

// Work that goes on because a follower ends reads elements that are not complete: Err says
// so, whichever end it is, once that work is done.
func TestWorkThatAnEndReleases(t *testing.T) {
	gputest.Unordered(t) // it reads what the publisher has yet to write
	for what, c := range cutOff {
		for _, withdrawn := range []bool{false, true} {
			for _, complete := range []bool{false, true} {
				name, why := what, c.why
				if withdrawn {
					name, why = name+", after a Withdraw", publish.ErrWithdrawn
				}
				if complete {
					name += ", of complete elements"
				}
				t.Run(name, func(t *testing.T) {
					m, sys := sim.Open(t, sim.Options{Devices: make([]sim.DeviceOptions, 2)})
					there, here := sys.Devices()[0], sys.Devices()[1]
					server, path := publishing(t, publish.ServerOptions{})
					a, p := published(t, server, there)
					writer, reader := stream(t, there), stream(t, here)
					host, err := here.NewHostBuffer(4000)
					require.NoError(t, err)
					closeLater(t, host)
					require.NoError(t, a.Resize(writer, 1000))
					require.NoError(t, p.Announce(peertest.Context(t), 1000, writer))
					k := client(t, path)
					f := followed(t, k, here, publish.FollowOptions{})
					require.NoError(t, f.Next(peertest.Context(t), reader))
					require.NoError(t, reader.Synchronize())

					goOn := m.Hold(writer.Handle())
					defer goOn()
					require.NoError(t, writer.Memset(a.Ptr(), 1, 4000))
					require.NoError(t, p.Announce(peertest.Context(t), 1000, writer))
					require.NoError(t, f.Next(peertest.Context(t), reader))
					require.NoError(t, f.Array().All().CopyToHost(reader, host.All()))
					if withdrawn {
						require.NoError(t, p.Withdraw())
						require.ErrorIs(t, f.Next(peertest.Context(t)), publish.ErrWithdrawn)
					}
					if complete {
						goOn()
						require.NoError(t, reader.Synchronize())
					} else {
						done, err := reader.Done()
						require.NoError(t, err)
						require.False(t, done, "a Withdraw releases no stream")
						require.NotErrorIs(t, f.Err(), publish.ErrUnfinished)
					}
					require.NoError(t, c.end(f, k, reader))
					require.NoError(t, reader.Synchronize())
					require.Equal(t, complete, host.All().Bytes()[0] == 1)
					if complete {
						require.EqualValues(t, 2, f.Generation())
						require.NotErrorIs(t, f.Err(), publish.ErrUnfinished)
					} else {
						require.EqualValues(t, 1, f.Generation())
						require.ErrorIs(t, f.Err(), publish.ErrUnfinished)
					}
					require.Eventually(t, func() bool { return f.State() == publish.Ended }, peertest.Guard, time.Millisecond)
					require.ErrorIs(t, f.Err(), why)
				})
			}
		}
	}
}
