// Command 05-pool-capture captures a graph that works on memory of a pool. It
// replays the graph while the pool serves another stream, destroys it, and shows
// that its memory came back.
//
//	go run ./samples/05-pool-capture [-driver auto|real|sim] [-replays N]
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm/pool"
)

const mib = 1 << 20

var sample = app.Sample{
	Name:  "05-pool-capture",
	Shows: "a graph that keeps the memory it was captured with, and gives it back at its end",
	Next:  "06-aliasing: one memory at two addresses, from the objects beneath arrays and pools",
	Run:   run,
}

func main() { app.Main(sample) }

func run(e *app.Env) (err error) {
	replays := e.Flags.Int("replays", 3, "how many `times` to replay the graph")
	if err := e.Open(); err != nil {
		return err
	}
	if *replays < 1 {
		return app.Usagef("-replays %d: at least 1", *replays)
	}
	s, err := e.Device.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer app.Close(s, &err)
	p, err := pool.New(e.Device, pool.Options{Chunk: 2 * mib})
	if err != nil {
		return err
	}
	defer app.Close(p, &err)

	// The graph's result outlives each of its runs: a workspace, made before.
	ws, err := p.Prepare(s, pool.Workspace{Name: "result", Bytes: 1 * mib, Tag: pool.NewTag("result")})
	if err != nil {
		return errors.Join(err, ws.Close())
	}
	defer func() { err = errors.Join(err, ws.Close(s)) }()
	result, _ := ws.Get("result")

	// What the body allocates has its address in the graph. Freeing it there
	// lets later requests of the same capture have it, and no one else.
	var inside cuda.Ptr
	g, stats, err := p.Capture(s, pool.CaptureOptions{Workspaces: ws}, func() error {
		b, err := p.Alloc(pool.Request{Bytes: 8 * mib, Stream: s, Tag: pool.NewTag("scratch")})
		if err != nil {
			return err
		}
		inside = b.Ptr()
		return errors.Join(
			s.Memset(b.Ptr(), 42, b.Bytes()),
			s.Copy(result.Ptr(), b.Ptr(), result.Bytes()),
			p.Free(b),
		)
	})
	if err != nil {
		return err
	}
	defer app.Close(g, &err) // closing twice is fine
	e.Line("captured", "%d request of %d MiB at %v", stats.Served, stats.Bytes/mib, inside)
	if err := replay(e.Context, p, g, s, *replays, inside, result); err != nil {
		return err
	}
	e.Line("replays", "%d, beside another stream, verified", *replays)

	kept, err := trimmed(p)
	if err != nil {
		return err
	}
	e.Line("trimmed", "the pool keeps %d MiB: the graph's and its result's", kept/mib)
	if err := g.Close(); err != nil {
		return err
	}
	left, err := trimmed(p)
	if err != nil {
		return err
	}
	if left+8*mib > kept {
		return fmt.Errorf("the graph's memory did not come back: %d bytes before it was closed, %d after", kept, left)
	}
	e.Line("destroyed", "and %d MiB: the graph's memory came back", left/mib)
	return nil
}

// trimmed gives back all that the pool does not need, and returns the bytes of
// memory that the pool keeps.
func trimmed(p *pool.Pool) (int, error) {
	_, err := p.Trim(0)
	return p.Stats().Reserved, err
}

// replay launches the graph while another stream takes memory, writes to it, and
// frees it, and checks the graph's result each time.
func replay(ctx context.Context, p *pool.Pool, g *cuda.Graph, s *cuda.Stream, replays int, inside cuda.Ptr, result pool.Block) (err error) {
	other, err := s.Device().NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer app.Close(other, &err)
	got := make([]byte, result.Bytes())
	for i := range replays {
		if ctx.Err() != nil {
			return fmt.Errorf("interrupted after %d of %d replays: %w", i, replays, ctx.Err())
		}
		err := g.Launch(s)
		for range 4 {
			b, refused := p.Alloc(pool.Request{Bytes: 8 * mib, Stream: other})
			if refused != nil {
				return errors.Join(err, refused)
			}
			err = errors.Join(err, other.Memset(b.Ptr(), 7, b.Bytes()), p.Free(b))
			if b.Ptr() == inside {
				return errors.Join(err, errors.New("the graph's memory was given to another stream"))
			}
		}
		if err := errors.Join(err, s.Download(got, result.Ptr())); err != nil {
			return err
		}
		if n := bytes.Count(got, []byte{42}); n != len(got) {
			return fmt.Errorf("%d of %d bytes of the result are not 42", len(got)-n, len(got))
		}
	}
	return nil
}
