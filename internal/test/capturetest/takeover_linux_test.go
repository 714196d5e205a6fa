package capturetest

import (
	"context"
	"errors"
	"path/filepath"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func sharedFolder(t *testing.T) string { return filepath.Join(t.TempDir(), "machine") }

// takesOver takes over a publication of another process, which was killed.
func takesOver(w *world) func() error {
	dir := filepath.Join(w.TempDir(), "d")
	publisher := reexec.Command(w.TB, "publisher", w.folder, dir)
	publisher.Start()
	var ready bool
	publisher.Recv(&ready)
	k := made[*publish.Client](w)(publish.Dial(w.soon(), filepath.Join(dir, "s"), publish.DialOptions{}))
	f := made[*publish.Follower[byte]](w)(publish.Follow[byte](w.soon(), k, w.dev, "name", publish.FollowOptions{KeepDescriptors: true}))
	require.NoError(w, f.Next(w.soon()))
	publisher.Kill()
	s, array := w.server(), f.Array()
	return func() error {
		p, err := publish.TakeOver(w.soon(), s, f)
		if err != nil {
			return err
		}
		w.Cleanup(func() { require.NoError(w, errors.Join(p.Withdraw(), array.Close())) })
		if array.Len() != 2*mib {
			return errors.New("the array lost its contents")
		}
		return nil
	}
}

func init() {
	reexec.Register("publisher", func(c *reexec.Child) error {
		folder, dir := c.Args[0], c.Args[1]
		var sys *cuda.System
		var err error
		if folder == "" {
			sys, err = cuda.Open(cuda.Options{})
		} else {
			sys, err = auto.Open(auto.Options{Driver: auto.Software, Machine: place{folder: folder}.machine()})
		}
		if err != nil {
			return err
		}
		b, err := vmm.NewBuffer(sys.Devices()[0], vmm.BufferOptions{Reserve: 8 * mib})
		if err != nil {
			return err
		}
		if _, err := b.AppendUndefined(2 * mib); err != nil {
			return err
		}
		l, err := peer.Listen(dir, "s", peer.Options{})
		if err != nil {
			return err
		}
		s := publish.NewServer(publish.ServerOptions{})
		go func() { _ = s.Serve(context.Background(), l) }()
		p, err := s.Publish("name", b)
		if err != nil {
			return err
		}
		if err := p.Announce(context.Background(), 2*mib); err != nil {
			return err
		}
		// The announcement is complete by a write of the GPU, which a kill would overtake.
		if err := core.SystemOf(sys).WaitAll("publish"); err != nil {
			return err
		}
		if err := c.Send(true); err != nil {
			return err
		}
		return c.Recv(&folder) // until it is killed
	})
}
