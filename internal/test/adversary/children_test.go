//go:build linux

package adversary

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
)

// news is what a child tells of itself.
type news struct {
	Progress bool
	Gone     bool   // it was told that the other is gone
	Err      string // and how
}

func init() {
	reexec.Register("adversary: follower", func(c *reexec.Child) error {
		sys, err := machine(c.Args[1])
		if err != nil {
			return err
		}
		ctx := context.Background()
		conn, err := peer.Dial(ctx, c.Args[0], peer.Options{})
		if err != nil {
			return err
		}
		k := publish.NewClient(conn)
		f, err := publish.Follow[uint32](ctx, k, sys.Devices()[0], "p", publish.FollowOptions{})
		if err != nil {
			return err
		}
		for {
			err := f.Next(ctx)
			if err != nil && f.Err() != nil {
				gone := errors.Is(f.Err(), peer.ErrGone) || errors.Is(f.Err(), publish.ErrUnfinished)
				closed := errors.Join(f.Close(), k.Close(), sys.Close())
				return errors.Join(closed, c.Send(news{Gone: gone, Err: f.Err().Error()}))
			}
			if err := c.Send(news{Progress: err == nil, Err: fmt.Sprint(err)}); err != nil {
				return err
			}
		}
	})
	// It follows once, with so few files to open, and tells how that went.
	reexec.Register("adversary: follows once", func(c *reexec.Child) error {
		files, err := strconv.ParseUint(c.Args[2], 10, 64)
		if err != nil {
			return err
		}
		if err := confine(files, false); err != nil {
			return err
		}
		if err := followOnce(c.Args[0], c.Args[1]); err != nil {
			return c.Send(news{Err: err.Error()})
		}
		return c.Send(news{Progress: true})
	})
}

// followOnce sees whatever "p" shows first.
func followOnce(path, folder string) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	sys, err := machine(folder)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	conn, err := peer.Dial(ctx, path, peer.Options{})
	if err != nil {
		return err
	}
	k := publish.NewClient(conn)
	defer func() { err = errors.Join(err, k.Close()) }()
	f, err := publish.Follow[uint32](ctx, k, sys.Devices()[0], "p", publish.FollowOptions{})
	if err != nil {
		return err
	}
	return errors.Join(f.Next(ctx), f.Close())
}

// child is a process that tells news.
type child struct {
	t   *testing.T
	cmd *reexec.Cmd
}

func startChild(t *testing.T, name string, args ...string) *child {
	t.Helper()
	c := &child{t, reexec.Command(t, "adversary: "+name, args...)}
	c.cmd.Timeout = testTimeout
	c.cmd.Start()
	return c
}

// startFollower starts one on the machine of the folder, or on one of its own.
func startFollower(t *testing.T, path, folder string) *child {
	t.Helper()
	return startChild(t, "follower", path, folder)
}

// wait waits for news.
func (c *child) wait() (n news) {
	c.t.Helper()
	c.cmd.Recv(&n)
	return n
}

// progress waits until the child goes on.
func (c *child) progress() {
	c.t.Helper()
	n := c.wait()
	require.True(c.t, n.Progress, "%+v", n)
}
