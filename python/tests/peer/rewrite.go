package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/vmm"
)

// uniform publishes elements that are all the same.
func (p *program) uniform(ctx context.Context, name string, length int) error {
	a, err := vmm.NewArray[uint32](p.dev, vmm.BufferOptions{Reserve: 4 * most, Memory: vmm.Properties{Handles: vmm.PosixFD}})
	if err != nil {
		return err
	}
	p.arrays[name] = a
	if _, err := a.Append(p.stream, make([]uint32, length)); err != nil {
		return err
	}
	if p.shown[name], err = publish.Array(p.server, name, a); err != nil {
		return err
	}
	return p.shown[name].Announce(ctx, length, p.stream)
}

// rewrite gives all elements of "table" another value, half by half.
func (p *program) rewrite(ctx context.Context, times int, o publish.RewriteOptions) error {
	for n := 0; times == 0 || n < times; n++ {
		if err := p.shown["table"].Rewrite(ctx, o); err != nil {
			return err
		}
		if err := errors.Join(p.half(0), p.half(1), p.shown["table"].Announce(ctx, p.arrays["table"].Len(), p.stream)); err != nil {
			return err
		}
	}
	return p.told(ctx)
}

// told waits until the followers have all that was announced of "table", and the words tell that it is complete.
func (p *program) told(ctx context.Context) error {
	return errors.Join(p.shown["table"].Settle(ctx), core.SystemOf(p.dev).WaitAll("tests/peer"))
}

// sleep suspends the memory of "table" with its followers, between two rewritings.
func (p *program) sleep(ctx context.Context, times int) error {
	for range times {
		s, err := vmm.Suspend(ctx, vmm.SuspendOptions{}, p.arrays["table"])
		if err == nil {
			err = errors.Join(s.Resume(ctx), p.rewrite(ctx, 1, publish.RewriteOptions{}))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// turn rewrites the half of "table" that is not shown.
func (p *program) turn(ctx context.Context, times int) error {
	table, n := p.shown["table"], p.arrays["table"].Len()
	for i := 0; times == 0 || i < times; i++ {
		if err := table.Rewrite(ctx, publish.RewriteOptions{Turn: true}); err != nil {
			return err
		}
		from, _ := publish.HalfOf(table.Stats().Generation+1, n)
		if err := errors.Join(p.half(2*from/n), table.Announce(ctx, n, p.stream)); err != nil {
			return err
		}
	}
	return p.told(ctx)
}

func (p *program) half(which int) error {
	a := p.arrays["table"]
	bytes := 4 * a.Len() / 2
	return p.stream.Memset(a.Ptr()+cuda.Ptr(which*bytes), byte(p.shown["table"].Stats().Generation), bytes)
}

// check reads in three ways: with a stream, without one, and with a release right behind the read.
func (p *program) check(ctx context.Context, socket, name string, times int) (string, error) {
	mixed := 0
	err := p.following(ctx, socket, name, true, func(f *publish.Follower[uint32]) error {
		for n := range times {
			streams := []*cuda.Stream{p.stream}[n%3/2:]
			if err := f.Next(ctx, streams...); err != nil {
				return err
			}
			values := make([]uint32, f.Len())
			if err := f.Array().All().CopyTo(p.stream, values); err != nil {
				return err
			}
			if n%3 == 1 {
				if err := f.Release(p.stream); err != nil {
					return err
				}
			}
			for _, v := range values {
				if v != values[0] {
					mixed++
					break
				}
			}
		}
		return nil
	})
	return fmt.Sprint(mixed), err
}

// late holds what it was shown until the publisher goes on without it.
func (p *program) late(ctx context.Context, socket, name string) (said string, err error) {
	err = p.following(ctx, socket, name, true, func(f *publish.Follower[uint32]) error {
		if err := f.Next(ctx); err != nil {
			return err
		}
		fmt.Fprintln(os.Stdout, "holds")
		for f.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		said = fmt.Sprintf("excluded %v, intact %v", errors.Is(f.Err(), publish.ErrExcluded), f.Intact(1))
		return nil
	})
	return said, err
}
