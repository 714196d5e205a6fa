// Command 11-ipc-server publishes an array that grows and shrinks, to any number of
// processes that follow it. In a terminal each:
//
//	go run ./samples/11-ipc-server publish
//	go run ./samples/11-ipc-server follow
//	go run ./samples/11-ipc-server list
//
// Every follower maps the array at an address of its own, checks each element, and
// prints what changes. Kill any of them: the others go on. Flags come first: -dir
// names the folder in which the processes meet. Without a command the sample runs a
// publisher and two followers for a moment.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/samples/internal/app"
)

var sample = app.Sample{
	Name:  "11-ipc-server",
	Shows: "an array that grows and shrinks, published to any number of followers",
	Next:  "12-managed: memory that both the CPU and the GPU use",
	Arg:   "publish | follow | list",
	Run:   run,
}

func main() { app.Main(sample) }

// options are the flags.
type options struct {
	dir, name          string
	step, most, rounds int
	every              time.Duration
	followers          int
}

func (o options) socket() string { return filepath.Join(o.dir, "server") }

func run(e *app.Env) error {
	var o options
	e.Flags.StringVar(&o.dir, "dir", filepath.Join(os.TempDir(), fmt.Sprintf("cuvmm-%d", os.Getuid())), "the private `folder` in which the processes meet")
	e.Flags.StringVar(&o.name, "name", "numbers", "the publication's `name`")
	e.Flags.IntVar(&o.step, "step", 1<<18, "publish: how many `elements` the array grows by")
	e.Flags.IntVar(&o.most, "most", 1<<21, "publish: at how many `elements` it shrinks to a quarter")
	e.Flags.IntVar(&o.rounds, "rounds", 0, "publish: how many `times` it changes; 0 is until an interrupt")
	e.Flags.IntVar(&o.followers, "followers", 0, "publish: how many `followers` to wait for")
	e.Flags.DurationVar(&o.every, "every", time.Second, "publish: the `time` between changes")
	if err := e.Parse(); err != nil {
		return err
	}
	if o.step <= 0 || o.most < o.step || o.most > 1<<32 || o.rounds < 0 || o.followers < 0 || o.every < 0 {
		return app.Usagef("-step %d -most %d -rounds %d -followers %d -every %v: -step must be positive, -most at least as much and at most %d, and the others not negative",
			o.step, o.most, o.rounds, o.followers, o.every, 1<<32)
	}
	do := map[string]func(*app.Env, options) error{"": demonstrate, "publish": serve, "follow": follow, "list": list}[e.Arg]
	if do == nil {
		return app.Usagef("command %q: use publish, follow or list", e.Arg)
	}
	if err := e.Open(); err != nil {
		return err
	}
	if err := e.Offer(); err != nil {
		return err
	}
	return do(e, o)
}

// connect returns a client of the publisher.
func connect(ctx context.Context, o options) (*publish.Client, error) {
	conn, err := peer.Dial(ctx, o.socket(), peer.Options{})
	if err != nil {
		return nil, err
	}
	return publish.NewClient(conn), nil
}

func list(e *app.Env, o options) (err error) {
	client, err := connect(e.Context, o)
	if err != nil {
		return err
	}
	defer app.Close(client, &err)
	all, err := client.List(e.Context)
	for _, p := range all {
		e.Line("published", "%q: length %d, of %v, in %d MiB, generation %d", p.Name, p.Length, p.Element, p.Bytes>>20, p.Generation)
	}
	return err
}

// demonstrate runs a publisher and two followers, each in a process of its own.
func demonstrate(e *app.Env, o options) (err error) {
	if o.dir, err = os.MkdirTemp("", e.Flags.Name()); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(o.dir)) }()
	all, alive := errgroup.WithContext(e.Context) // one that fails ends the others
	start := func(args ...string) error {
		cmd, err := e.Again(alive, "demonstration", append([]string{"-dir", o.dir, "-name", o.name}, args...)...)
		if err != nil {
			return err
		}
		cmd.Stderr = e.Out // between the lines of the others
		if err := cmd.Start(); err != nil {
			return err
		}
		all.Go(cmd.Wait)
		return nil
	}
	all.Go(func() error {
		if err := start("-rounds", "12", "-every", "10ms", "-followers", "2", "publish"); err != nil {
			return err
		}
		for alive.Err() == nil { // until the publisher listens
			if _, err := os.Lstat(o.socket()); err == nil {
				return errors.Join(start("follow"), start("follow"))
			}
			time.Sleep(time.Millisecond)
		}
		return nil
	})
	return unlessEnded(e.Context, all.Wait())
}

// unlessEnded returns the error, unless it comes from an interrupt, which is no
// failure.
func unlessEnded(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}
