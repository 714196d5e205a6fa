package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/samples/internal/app"
)

// follow prints what changes and checks every element, until the publisher ends.
func follow(e *app.Env, o options) (err error) {
	ctx := e.Context
	client, err := connect(ctx, o)
	if err != nil {
		return unlessEnded(ctx, err)
	}
	defer app.Close(client, &err)
	s, err := e.Device.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer app.Close(s, &err)
	f, err := publish.Follow[uint64](ctx, client, e.Device, o.name, publish.FollowOptions{
		ReadOnly: true,
		// All work of this process on the array is on one stream.
		Quiesce: func(int) []*cuda.Stream { return []*cuda.Stream{s} },
	})
	if err != nil {
		return unlessEnded(ctx, err)
	}
	defer app.Close(f, &err)
	say := func(format string, args ...any) {
		e.Line("follower", "process %d: %s", os.Getpid(), fmt.Sprintf(format, args...))
	}
	say("%q at %v", o.name, f.Array().Ptr())
	for {
		err := f.Next(ctx, s)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, publish.ErrWithdrawn):
			say("withdrawn")
			return nil
		case errors.Is(err, peer.ErrGone):
			say("the publisher is gone; a length of %d stays mapped: %v", f.Len(), err)
			return nil
		case err != nil:
			return err
		}
		if err := check(f, s); err != nil {
			return err
		}
		say("generation %d, length %d, every element as it should be", f.Generation(), f.Len())
	}
}

// check compares every element that is shown.
func check(f *publish.Follower[uint64], s *cuda.Stream) error {
	all := f.Array().All()
	got := make([]uint64, all.Len())
	err := all.CopyTo(s, got)
	if err != nil && f.Len() < len(got) {
		return nil // the publisher shrank it meanwhile: Next reports that
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
