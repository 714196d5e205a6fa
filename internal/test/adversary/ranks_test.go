//go:build linux

package adversary

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// groupSize is how many ranks a group has.
const groupSize = 4

func init() {
	reexec.Register("adversary: rank", func(c *reexec.Child) error {
		rank, err := strconv.Atoi(c.Args[0])
		if err != nil {
			return err
		}
		sys, err := machine(c.Args[2])
		if err != nil {
			return err
		}
		g, err := enter(c.Args[1], rank)
		if err != nil {
			return c.Send(news{Err: err.Error()})
		}
		err = sharesForEver(c, g, sys.Devices()[0])
		gone := errors.Is(err, peer.ErrGone) || errors.Is(err, rendezvous.ErrFailed)
		return errors.Join(g.Close(), c.Send(news{Gone: gone, Err: err.Error()}))
	})
}

// enter makes the group, or joins it.
func enter(dir string, rank int) (*rendezvous.Group, error) {
	o := rendezvous.Options{Timeout: patience}
	if rank == 0 {
		g, _, err := rendezvous.Host(dir, "group", groupSize, o)
		return g, err
	}
	for end := time.Now().Add(patience / 2); ; time.Sleep(time.Millisecond) {
		g, err := rendezvous.Join(context.Background(), filepath.Join(dir, "group"), rank, groupSize, o)
		if err == nil || time.Now().After(end) {
			return g, err
		}
	}
}

// sharesForEver shares a buffer in one round after the other, until one fails.
func sharesForEver(c *reexec.Child, g *rendezvous.Group, d *cuda.Device) (err error) {
	ctx := context.Background()
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 4 * chunk, Chunks: vmm.FixedChunks(chunk)})
	if err != nil {
		return err
	}
	if err := b.Grow(4 * chunk); err != nil {
		return err
	}
	for {
		agreed, err := rendezvous.Agree(ctx, g, rendezvous.FactsOf(d, vmm.PosixFD))
		if err != nil {
			return err
		}
		all, err := rendezvous.Share(ctx, g, agreed, d, b, rendezvous.ShareOptions{})
		if err != nil {
			return err
		}
		for _, of := range all {
			if of != nil {
				err = errors.Join(err, of.Close())
			}
		}
		if err := errors.Join(err, c.Send(news{Progress: true})); err != nil {
			return err
		}
	}
}

// A rank is killed at a random moment. The others are told and end, and nothing is
// left on their machine.
func TestKilledRanks(t *testing.T) {
	for round := range times(4) {
		r := rand.New(rand.NewPCG(uint64(round), 5))
		folder, dir := filepath.Join(t.TempDir(), "machine"), filepath.Join(t.TempDir(), "sockets")
		ranks := make([]*child, groupSize)
		for i := range ranks {
			ranks[i] = startChild(t, "rank", strconv.Itoa(i), dir, folder)
		}
		killed := r.IntN(groupSize)
		if round%4 > 0 { // else in its first moments
			ranks[killed].progress()
		}
		time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
		ranks[killed].cmd.Kill()
		for i, rank := range ranks {
			switch {
			case i == killed:
			case round%4 == 0: // before a group was complete its ranks wait for the killed one
				rank.cmd.Kill()
			default:
				rank.isTold()
			}
		}
		require.Eventually(t, func() bool {
			u, err := sim.Inspect(folder)
			if errors.Is(err, os.ErrNotExist) {
				return true // all were killed before they made a machine
			}
			require.NoError(t, err)
			return len(u.Processes) == 0 && len(u.Exported) == 0 && u.Devices[0].Taken == 0 && u.HostTaken == 0
		}, patience, time.Millisecond, "round %d: something stays", round)
	}
}
