package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/vmm"
)

// element is what stands at a place of the array.
func element(i int) uint64 { return uint64(i)*0x9e3779b97f4a7c15 + 1 }

// publish serves an array that grows by steps, and shrinks to a quarter where it
// would become too long.
func serve(ctx context.Context, dev *cuda.Device, o options, out io.Writer) (err error) {
	array, err := vmm.NewArray[uint64](dev, vmm.BufferOptions{Reserve: 8 * o.most, Chunks: vmm.FixedChunks(2 << 20)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, array.Close()) }()
	server := publish.NewServer(publish.ServerOptions{})
	defer func() { err = errors.Join(err, server.Close()) }()
	p, err := publish.Array(server, o.name, array)
	if err != nil {
		return err
	}
	listener, err := peer.Listen(o.dir, "server", peer.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, listener.Close()) }()
	served := make(chan error, 1)
	go func() { served <- server.Serve(context.Background(), listener) }()
	defer func() { err = errors.Join(err, server.Close(), <-served) }()
	fmt.Fprintf(out, "publisher  %q at %v, for followers of %s\n", o.name, array.Ptr(), listener.Path())

	s, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if err := unlessEnded(ctx, p.AwaitFollowers(ctx, o.followers)); err != nil {
		return err
	}
	for round := 0; ctx.Err() == nil && (o.rounds == 0 || round < o.rounds); round++ {
		if err := change(ctx, array, p, s, o); err != nil {
			return err
		}
		st := p.Stats()
		_, err := fmt.Fprintf(out, "publisher  generation %d: length %d in %d MiB; followers: %d, which keep %d MiB that are no longer published\n",
			st.Generation, st.Length, st.Bytes>>20, len(st.Followers), st.Pinned>>20)
		if err != nil {
			return err
		}
		select {
		case <-time.After(o.every):
		case <-ctx.Done():
		}
	}
	// Followers get what is on its way before the end.
	bounded, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return p.Settle(bounded)
}

// change makes the array longer, or shorter where it would become too long.
func change(ctx context.Context, array *vmm.Array[uint64], p *publish.Publication, s *cuda.Stream, o options) error {
	if array.Len()+o.step > o.most {
		return p.Shrink(array.Len()/4, s)
	}
	more := make([]uint64, o.step)
	for i := range more {
		more[i] = element(array.Len() + i)
	}
	if _, err := array.Append(s, more); err != nil {
		return err
	}
	return unlessEnded(ctx, p.Announce(ctx, array.Len(), s))
}

// unlessEnded is the error of what an interrupt ends, which is no failure.
func unlessEnded(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}
