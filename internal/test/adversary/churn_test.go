//go:build linux

package adversary

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// Honest clients come, follow and go in every order, among others that leave in
// the middle of a message. The publisher keeps nothing of any.
func TestChurn(t *testing.T) {
	p := victim{}.starts(t)
	p.does("announce", 2)
	p.serves(2)
	before := p.does("stats", 0)
	sys, err := machine("")
	require.NoError(t, err)
	d := sys.Devices()[0]
	require.NoError(t, within(t, "churn", func() error {
		var clients errgroup.Group
		for n := range uint64(4) {
			clients.Go(func() error {
				r := rand.New(rand.NewPCG(n, 7))
				for range times(25) {
					if err := comesAndGoes(p.path, d, r); err != nil {
						return err
					}
				}
				return nil
			})
		}
		return clients.Wait()
	}))
	require.NoError(t, sys.Close())
	require.Eventually(t, func() bool {
		now := p.does("stats", 0)
		return now.Followers == 0 && now.Files <= before.Files && now.Goroutines <= before.Goroutines
	}, testTimeout, 10*time.Millisecond, "%+v before", before)
	p.does("announce", 3)
	p.serves(3)
	p.ends()
}

// comesAndGoes is one client's visit, and sometimes a rude one after it.
func comesAndGoes(path string, d *cuda.Device, r *rand.Rand) error {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	c, err := peer.Dial(ctx, path, peer.Options{})
	if err != nil {
		return err
	}
	k := publish.NewClient(c)
	if r.IntN(4) == 0 {
		_, err = k.List(ctx)
	}
	f, failed := publish.Follow[uint32](ctx, k, d, "p", publish.FollowOptions{})
	if err := errors.Join(err, failed); err != nil {
		return err
	}
	if r.IntN(2) == 0 {
		err = f.Next(ctx)
	}
	if r.IntN(2) == 0 {
		err = errors.Join(err, k.Close())
	}
	if err := errors.Join(err, f.Close(), k.Close()); err != nil {
		return err
	}
	if r.IntN(3) > 0 {
		return nil
	}
	w, err := dial(path)
	if err != nil {
		return err
	}
	defer w.close()
	if err := w.send(follow, followBody(1, 0, "p")); err != nil || r.IntN(2) == 0 {
		return err
	}
	return w.part(list, []byte{1}, 4, 0)
}

// Publisher and followers have hardly any files to open. Each announcement and each
// follow succeeds or is refused with a reason, and with more files all works again.
func TestFewFiles(t *testing.T) {
	for _, limit := range []uint64{32, 64} {
		folder := t.TempDir()
		p := victim{Folder: folder, Files: limit, Timeout: time.Second}.starts(t)
		for n := 1; n <= 48; n += 5 {
			p.ask("announce", n)
			f := startChild(t, "follows once", p.path, folder, "32")
			said := f.wait()
			require.True(t, said.Progress || said.Err != "", "neither a success nor a reason")
			f.cmd.Wait()
		}
		p.does("shrink", 1)
		require.Eventually(t, func() bool { return p.ask("announce", 2).Err == "" }, testTimeout, 10*time.Millisecond)
		f := startChild(t, "follows once", p.path, folder, "1024")
		f.progress()
		f.cmd.Wait()
		p.ends()
	}
}
