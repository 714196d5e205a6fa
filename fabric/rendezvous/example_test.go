package rendezvous_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/vmm"
)

// all runs a function for every rank of a group of goroutines.
func all(size int, rank func(ctx context.Context, g *rendezvous.Group)) {
	groups, err := rendezvous.InProcess(size, rendezvous.Options{})
	if err != nil {
		log.Fatal(err)
	}
	var running sync.WaitGroup
	for _, g := range groups {
		running.Go(func() {
			defer g.Close()
			rank(context.Background(), g)
		})
	}
	running.Wait()
}

// Every rank gets the contributions of all.
func ExampleInProcess() {
	all(3, func(ctx context.Context, g *rendezvous.Group) {
		bodies, err := g.AllGather(ctx, "names", fmt.Appendf(nil, "rank %d", g.Rank()))
		if err != nil {
			log.Fatal(err)
		}
		if g.Rank() == 0 {
			fmt.Printf("%s\n", bodies)
		}
	})
	// Output: [rank 0 rank 1 rank 2]
}

// Exchange carries file descriptors too, within a host. The contributions of the
// other ranks are the caller's to close.
func ExampleContribution() {
	all(2, func(ctx context.Context, g *rendezvous.Group) {
		contributions, err := g.Exchange(ctx, "tables", rendezvous.Contribution{Body: fmt.Appendf(nil, "table %d", g.Rank())})
		if err != nil {
			log.Fatal(err)
		}
		for r := range contributions {
			if g.Rank() == 0 {
				fmt.Printf("%s with %d files\n", contributions[r].Body, len(contributions[r].Files))
			}
			contributions[r].Close()
		}
	})
	// Output:
	// table 0 with 0 files
	// table 1 with 0 files
}

// A transport to other processes or hosts carries events as bytes.
func ExampleEvent() {
	e := rendezvous.Event{Kind: rendezvous.Failed, Rank: 3, Step: rendezvous.Step{Number: 7, Name: "import memory"}, Reason: "no memory"}
	b, err := e.MarshalBinary()
	if err != nil {
		log.Fatal(err)
	}
	var got rendezvous.Event
	if err := got.UnmarshalBinary(b); err != nil {
		log.Fatal(err)
	}
	name := func(k rendezvous.EventKind) string { return k.String() }
	fmt.Printf("rank %d %v at step %d %q: %s\n", got.Rank, name(got.Kind), got.Step.Number, got.Step.Name, got.Reason)
	// Output: rank 3 failed at step 7 "import memory": no memory
}

// A rank that gives up ends the step for all, with the same error.
func ExampleError() {
	all(2, func(ctx context.Context, g *rendezvous.Group) {
		if g.Rank() == 1 {
			g.Fail(errors.New("no memory"))
			return
		}
		err := g.Barrier(ctx, "allocated")
		var step *rendezvous.Error
		if errors.As(err, &step) && errors.Is(err, rendezvous.ErrFailed) {
			fmt.Println("ranks", step.Ranks, "failed:", step.Reason)
		}
	})
	// Output: ranks [1] failed: no memory
}

// The ranks settle on one type of handle, and map each other's memory by it.
func ExampleShare() {
	machine, err := sim.New(sim.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer machine.Close()
	sys, err := machine.Open(cuda.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	dev := sys.Devices()[0]
	all(2, func(ctx context.Context, g *rendezvous.Group) {
		agreed, err := rendezvous.Agree(ctx, g, rendezvous.FactsOf(dev, vmm.PosixFD))
		if err != nil {
			log.Fatal(err)
		}
		mine, err := vmm.NewBuffer(dev, vmm.BufferOptions{Reserve: 2 << 20})
		if err != nil {
			log.Fatal(err)
		}
		defer mine.Close()
		if _, err := mine.Append(nil, fmt.Appendf(nil, "memory of rank %d", g.Rank())); err != nil {
			log.Fatal(err)
		}
		buffers, err := rendezvous.Share(ctx, g, agreed, dev, mine, rendezvous.ShareOptions{})
		if err != nil {
			log.Fatal(err)
		}
		other := buffers[1-g.Rank()]
		defer other.Close()
		if g.Rank() == 0 {
			text := make([]byte, other.Len())
			part, err := other.Slice(0, other.Len())
			if err != nil {
				log.Fatal(err)
			}
			if err := part.CopyTo(nil, text); err != nil {
				log.Fatal(err)
			}
			fmt.Printf("%s by %v\n", text, agreed.Handle)
		}
	})
	// Output: memory of rank 1 by fd
}

// solo carries a group of one rank. A real transport brings the events of all ranks
// to all of them, in one order.
type solo struct{ events chan rendezvous.Event }

func (s solo) Rank() int          { return 0 }
func (s solo) Size() int          { return 1 }
func (s solo) CarriesFiles() bool { return false }

func (s solo) Post(_ context.Context, step rendezvous.Step, c rendezvous.Contribution) error {
	fmt.Printf("step %d %q: %d bytes\n", step.Number, step.Name, len(c.Body))
	s.events <- rendezvous.Event{Kind: rendezvous.Posted, Step: step}
	return nil
}

func (s solo) Fail(_ context.Context, e rendezvous.Event) error {
	s.events <- e
	return nil
}

func (s solo) Next(ctx context.Context) (rendezvous.Event, error) {
	select {
	case e := <-s.events:
		return e, nil
	case <-ctx.Done():
		return rendezvous.Event{}, ctx.Err()
	}
}

func (s solo) Close(*rendezvous.Event) error { return nil }

// A group over a transport of the program's own.
func ExampleNew() {
	var t rendezvous.Transport = solo{make(chan rendezvous.Event, 1)}
	g := rendezvous.New(t, rendezvous.Options{})
	defer g.Close()
	if err := g.Barrier(context.Background(), "ready"); err != nil {
		log.Fatal(err)
	}
	// Output: step 0 "ready": 0 bytes
}
