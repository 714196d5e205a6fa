// Command 10-pool-capture captures a graph over memory of a pool, replays it
// while the pool serves others, destroys it, and shows that its memory came
// back.
//
//	go run ./samples/10-pool-capture [-driver auto|real|sim] [-replays n]
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/vmm/pool"
)

const mib = 1 << 20

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "10-pool-capture:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("10-pool-capture", flag.ContinueOnError)
	driver := flags.String("driver", "", "`auto`, real or sim (default: $CUVMM_DRIVER, or auto)")
	replays := flags.Int("replays", 3, "replay the graph so many `times`")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("argument %q: only flags are taken", flags.Arg(0))
	}
	if *replays < 1 {
		return fmt.Errorf("-replays %d: at least 1", *replays)
	}
	sys, err := auto.Open(auto.Options{Driver: auto.Choice(*driver)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	dev, err := sys.Device(0)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "driver     %v\n", sys.Driver())
	fmt.Fprintf(out, "device     %v\n", dev)
	return replay(dev, *replays, out)
}

// replay shows it with a stream for the graph and one for others.
func replay(dev *cuda.Device, replays int, out io.Writer) (err error) {
	s, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	other, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, other.Close()) }() // twice is once
	p, err := pool.New(dev, pool.Options{Chunk: 2 * mib})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()

	// What the graph leaves its result in is made ready before.
	ws, err := p.Prepare(s, pool.Workspace{Name: "result", Bytes: 1 * mib, Tag: pool.NewTag("result")})
	if err != nil {
		return errors.Join(err, ws.Close())
	}
	defer func() { err = errors.Join(err, ws.Close(s)) }()
	result, _ := ws.Get("result")

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
			p.Free(b), // the graph still has it, each time it runs
		)
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "captured   %d request of %d MiB at %v\n", stats.Served, stats.Bytes/mib, inside)
	if err := serve(p, g, s, other, replays, inside, result); err != nil {
		return errors.Join(err, g.Close())
	}
	fmt.Fprintf(out, "replays    %d, beside others, verified\n", replays)

	// The other stream's memory goes back to the driver, the graph's stays.
	if err := other.Close(); err != nil {
		return errors.Join(err, g.Close())
	}
	kept, err := trimmed(p)
	if err != nil {
		return errors.Join(err, g.Close())
	}
	fmt.Fprintf(out, "trimmed    the pool keeps %d MiB\n", kept/mib)
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
	_, err = fmt.Fprintf(out, "destroyed  and %d MiB: the graph's memory came back\n", left/mib)
	return err
}

// trimmed is what the pool keeps after it gave back what it can.
func trimmed(p *pool.Pool) (bytes uint64, err error) {
	_, err = p.Trim(0)
	return p.Stats().Reserved, err
}

// serve replays the graph while others take memory, write to it, and give it
// back, and checks the graph's result each time.
func serve(p *pool.Pool, g *cuda.Graph, s, other *cuda.Stream, replays int, inside cuda.Ptr, result pool.Block) error {
	for range replays {
		var theirs []pool.Block
		for range 4 {
			b, err := p.Alloc(pool.Request{Bytes: 8 * mib, Stream: other})
			if err != nil {
				return errors.Join(err, freeAll(p, theirs))
			}
			theirs = append(theirs, b)
			if b.Ptr() == inside {
				return errors.Join(errors.New("the graph's memory was given to another stream"), freeAll(p, theirs))
			}
		}
		err := g.Launch(s)
		for _, b := range theirs {
			err = errors.Join(err, other.Memset(b.Ptr(), 7, b.Bytes()))
		}
		if err := errors.Join(err, freeAll(p, theirs), verify(s, result)); err != nil {
			return err
		}
	}
	return nil
}

func freeAll(p *pool.Pool, blocks []pool.Block) (err error) {
	for _, b := range blocks {
		err = errors.Join(err, p.Free(b))
	}
	return err
}

// verify reads what the graph left.
func verify(s *cuda.Stream, result pool.Block) error {
	got := make([]byte, result.Bytes())
	if err := s.Download(got, result.Ptr()); err != nil {
		return err
	}
	for i, v := range got {
		if v != 42 {
			return fmt.Errorf("byte %d of the result is %d, not 42", i, v)
		}
	}
	return nil
}
