//go:build linux

package broker_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/testlog"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// round is what a publisher says: that it begins to write what has a seed, or that this is complete. The first
// one says what it found, or that this was incomplete, and the last that it has handed the memory on.
type round struct {
	Did, Incomplete, Handed bool
	Seed                    int
}

const keptBytes = 4 * kib64

// seedOf returns the seed of what is in memory, whole.
func seedOf(b *vmm.Buffer) (int, error) {
	got := make([]byte, b.Len())
	part, err := b.Slice(0, b.Len())
	if err == nil {
		err = part.CopyTo(nil, got)
	}
	if err != nil {
		return 0, err
	}
	return seedIn(got)
}

func seedIn(got []byte) (int, error) {
	seed := int(binary.LittleEndian.Uint64(got))
	for i := 0; i < len(got); i += 8 {
		if x := int(binary.LittleEndian.Uint64(got[i:])); x != seed {
			return 0, fmt.Errorf("seed %d beside %d at byte %d", x, seed, i)
		}
	}
	return seed, nil
}

// publisherRole rewrites memory of a broker until it is killed, or has handed it on: publisher FOLDER SOCKET DIR SEED.
func publisherRole(args []string) error {
	time.AfterFunc(time.Minute, func() { os.Exit(1) })
	seed, err := strconv.Atoi(args[3])
	if err != nil {
		return err
	}
	sys, err := open(args[0])
	if err != nil {
		return err
	}
	d := sys.Devices()[0]
	ctx := context.Background()
	k, err := broker.Dial(ctx, args[1], broker.DialOptions{Wait: true, ComeBack: publish.ComeBack{Most: 50 * time.Millisecond}})
	if err != nil {
		return err
	}
	kept, err := k.Keep(ctx, d, "weights", broker.KeepOptions{Bytes: keptBytes, Wait: true})
	if err != nil {
		return err
	}
	l, err := peer.Listen(args[2], "weights", peer.Options{})
	if err != nil {
		return err
	}
	s := publish.NewServer(publish.ServerOptions{})
	o := publish.PublishOptions{Page: kept.Page()}
	p, err := s.Publish("weights", kept.Buffer(), o)
	found := round{Incomplete: errors.Is(err, publish.ErrIncomplete)}
	if found.Incomplete {
		o.Incomplete = true
		p, err = s.Publish("weights", kept.Buffer(), o)
	}
	if err == nil && !found.Incomplete && p.Stats().Generation > 0 {
		found.Seed, err = seedOf(kept.Buffer())
	}
	if err != nil {
		return err
	}
	go func() { _ = s.Serve(ctx, l) }()
	say := json.NewEncoder(os.Stdout)
	if err := say.Encode(found); err != nil {
		return err
	}
	stream, err := d.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	data := make([]byte, keptBytes)
	for r := rand.New(rand.NewPCG(uint64(seed), 1)); ; seed++ {
		time.Sleep(time.Duration(r.IntN(5)) * time.Millisecond)
		if err := say.Encode(round{Seed: seed}); err != nil {
			return err
		}
		if !p.Stats().Rewriting {
			if err := p.Rewrite(ctx, publish.RewriteOptions{}); err != nil {
				return err
			}
		}
		for i := 0; i < len(data); i += 8 {
			binary.LittleEndian.PutUint64(data[i:], uint64(seed))
		}
		for at := 0; at < len(data); at += kib64 { // a kill may come between
			part, err := kept.Buffer().Slice(at, at+kib64)
			if err == nil {
				err = part.CopyFrom(stream, data[at:at+kib64])
			}
			if err != nil {
				return err
			}
		}
		if err := p.Announce(ctx, keptBytes, stream); err != nil {
			return err
		}
		// What is complete is so by a write of the GPU, which a kill would overtake.
		if err := core.SystemOf(d).WaitAll("publisher"); err != nil {
			return err
		}
		if err := say.Encode(round{Did: true, Seed: seed}); err != nil {
			return err
		}
		if r.IntN(16) == 0 {
			if err := errors.Join(s.Close(), l.Close(), kept.Close(), say.Encode(round{Handed: true})); err != nil {
				return err
			}
			select {} // the next one does not wait for its end
		}
	}
}

// Publishers and brokers die at random moments. The next publisher goes on with what was complete, or is told that
// it is not; and a follower keeps its memory all the time, and never shows a mixture.
func TestKillsOfPublishers(t *testing.T) {
	peertest.NoLeak(t)
	folder, dir, number := t.TempDir(), t.TempDir()+"/p", t.TempDir()+"/pid"
	l, err := peer.Listen(t.TempDir()+"/s", "broker", peer.Options{})
	require.NoError(t, err)
	f, err := l.File()
	require.NoError(t, err)
	k := keeper.New()
	running, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- k.Run(running, keeper.RunOptions{Command: func() *exec.Cmd {
			c := as("broker", folder, number)
			c.ExtraFiles = []*os.File{f}
			return c
		}})
	}()
	ctx := t.Context() // many rounds take longer than one step may
	sys, err := open(folder)
	require.NoError(t, err)
	d := sys.Devices()[0]
	// The first publisher has made the socket's folder.
	will, did := 0, 0
	var client *publish.Client
	var follower *publish.Follower[byte]
	var at cuda.Ptr
	shown, incomplete, whole, handed := 0, 0, 0, 0
	end := func(c *exec.Cmd, log *testlog.Log) {
		x := new(exec.ExitError)
		require.ErrorAs(t, c.Wait(), &x)
		require.True(t, x.Sys().(syscall.WaitStatus).Signaled(), "it had failed before: %s", log)
	}
	var before *exec.Cmd // which has handed the memory on, and lives
	var beforeLog *testlog.Log
	r := rand.New(rand.NewPCG(3, 4))
	for kills := range max(rounds()/8, 2) {
		c := as("publisher", folder, l.Path(), dir, strconv.Itoa(will+1))
		log := &testlog.Log{}
		c.Stderr = log
		out, err := c.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, c.Start())
		lines := bufio.NewScanner(out)
		require.True(t, lines.Scan(), "%s", log)
		var found round
		require.NoError(t, json.Unmarshal(lines.Bytes(), &found))
		if before != nil {
			require.Equal(t, round{Seed: did}, found, "what was handed on is whole")
			require.NoError(t, before.Process.Kill())
			end(before, beforeLog)
			before = nil
		}
		switch {
		case found.Incomplete:
			incomplete++
			require.Greater(t, will, did, "the publisher before had begun to rewrite")
		case kills > 0:
			whole++
			require.Contains(t, []int{did, will}, found.Seed)
		}
		if follower == nil {
			client, err = publish.Dial(ctx, dir+"/weights", publish.DialOptions{ComeBack: &publish.ComeBack{First: time.Millisecond, Most: 20 * time.Millisecond}})
			require.NoError(t, err)
			follower, err = publish.Follow[byte](ctx, client, d, "weights", publish.FollowOptions{})
			require.NoError(t, err)
			at = follower.Array().Ptr()
		}
		delay := time.Duration(r.IntN(60)) * time.Millisecond
		kill := time.AfterFunc(delay, func() { _ = c.Process.Kill() })
		if did == 0 {
			kill.Stop() // until it has done something
		}
		if kills%4 == 1 {
			if text, err := os.ReadFile(number); err == nil {
				pid, err := strconv.Atoi(string(text))
				require.NoError(t, err)
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		for lines.Scan() {
			var x round
			if json.Unmarshal(lines.Bytes(), &x) != nil {
				continue // cut off by a kill
			}
			if x.Handed {
				before, beforeLog = c, log
				break
			}
			will = x.Seed
			if x.Did {
				if did == 0 {
					kill.Reset(delay)
				}
				did = x.Seed
			}
		}
		if kill.Stop() && before != nil {
			handed++
		} else {
			end(c, log)
			before = nil
		}
		limited, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		if follower.Next(limited) == nil {
			shown++
			generation, got := follower.Generation(), make([]byte, keptBytes)
			require.NoError(t, follower.Array().All().CopyTo(nil, got))
			seed, err := seedIn(got)
			if follower.Intact(generation) {
				require.NoError(t, err)
				require.LessOrEqual(t, seed, will)
			}
			require.Equal(t, at, follower.Array().Ptr())
			require.NoError(t, follower.Release())
		}
		cancel()
	}
	t.Logf("%d times what was there was whole, %d times incomplete, %d times it was handed on; %d generations were read", whole, incomplete, handed, shown)
	if before != nil {
		require.NoError(t, before.Process.Kill())
		end(before, beforeLog)
	}
	require.Positive(t, did)
	closed(t, follower, client)
	ctx = peertest.Context(t)
	b, err := broker.Dial(ctx, l.Path(), broker.DialOptions{Wait: true})
	require.NoError(t, err)
	require.NoError(t, b.Remove(ctx, "weights", 0))
	require.Eventually(t, func() bool { return k.Len() == 0 }, peertest.Guard, 10*time.Millisecond)
	closed(t, b, sys)
	stop()
	require.NoError(t, <-ended)
	closed(t, f, l, io.Closer(k))
}
