package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
)

// follow prints what changes and checks every element, until the publisher ends.
func follow(ctx context.Context, dev *cuda.Device, o options, out io.Writer) (err error) {
	client, err := connect(ctx, o)
	if err != nil {
		return unlessEnded(ctx, err)
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	s, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	f, err := publish.Follow[uint64](ctx, client, dev, o.name, publish.FollowOptions{
		ReadOnly: true,
		// All work of this process on the array is on one stream.
		Quiesce: func(int) []*cuda.Stream { return []*cuda.Stream{s} },
	})
	if err != nil {
		return unlessEnded(ctx, err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	fmt.Fprintf(out, "follower   process %d: %q at %v\n", os.Getpid(), o.name, f.Array().Ptr())
	for {
		err := f.Next(ctx, s)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, publish.ErrWithdrawn):
			fmt.Fprintf(out, "follower   process %d: withdrawn\n", os.Getpid())
			return nil
		case errors.Is(err, peer.ErrGone):
			fmt.Fprintf(out, "follower   process %d: the publisher is gone; a length of %d stays mapped: %v\n", os.Getpid(), f.Len(), err)
			return nil
		case err != nil:
			return err
		}
		if err := check(f, s); err != nil {
			return err
		}
		_, err = fmt.Fprintf(out, "follower   process %d: generation %d, length %d, every element as it should be\n", os.Getpid(), f.Generation(), f.Len())
		if err != nil {
			return err
		}
	}
}

// check compares every element that is shown.
func check(f *publish.Follower[uint64], s *cuda.Stream) error {
	all := f.Array().All()
	got := make([]uint64, all.Len())
	err := all.CopyTo(s, got)
	if err != nil && f.Len() < len(got) {
		return nil // the publisher took some back meanwhile: Next says so
	}
	if err != nil {
		return err
	}
	for i, v := range got {
		if v != element(i) && i < f.Len() {
			return fmt.Errorf("element %d is %#x, not %#x", i, v, element(i))
		}
	}
	return nil
}
