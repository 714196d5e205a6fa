package main

import (
	"context"
	"errors"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

// element is the value at a place of the array.
func element(i int) uint64 { return uint64(i)*0x9e3779b97f4a7c15 + 1 }

// serve publishes an array that grows by steps, and shrinks to a quarter when it
// would become too long.
func serve(e *app.Env, o options) (err error) {
	ctx := e.Context
	array, err := vmm.NewArray[uint64](e.Device, vmm.BufferOptions{Reserve: 8 * o.most, Chunks: vmm.FixedChunks(2 << 20)})
	if err != nil {
		return err
	}
	defer app.Close(array, &err)
	server := publish.NewServer(publish.ServerOptions{})
	defer app.Close(server, &err)
	p, err := publish.Array(server, o.name, array)
	if err != nil {
		return err
	}
	listener, err := peer.Listen(o.dir, "server", peer.Options{})
	if err != nil {
		return err
	}
	defer app.Close(listener, &err)
	served := make(chan error, 1)
	go func() { served <- server.Serve(context.Background(), listener) }()
	defer func() { err = errors.Join(err, server.Close(), <-served) }()
	e.Line("publisher", "%q at %v, for followers of %s", o.name, array.Ptr(), listener.Path())

	s, err := e.Device.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer app.Close(s, &err)
	if err := unlessEnded(ctx, p.AwaitFollowers(ctx, o.followers)); err != nil {
		return err
	}
	for round := 0; ctx.Err() == nil && (o.rounds == 0 || round < o.rounds); round++ {
		if err := change(ctx, array, p, s, o); err != nil {
			return err
		}
		st := p.Stats()
		e.Line("publisher", "generation %d: length %d in %d MiB; followers: %d, which still map %d MiB that were taken back",
			st.Generation, st.Length, st.Bytes>>20, len(st.Followers), st.Pinned>>20)
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

// change makes the array longer, or shorter if it would become too long.
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
