// Command 11-ipc-server publishes an array that grows and shrinks, to any number
// of processes that follow it. On a terminal each:
//
//	go run ./samples/11-ipc-server publish
//	go run ./samples/11-ipc-server follow
//	go run ./samples/11-ipc-server list
//
// Every follower maps the array at an address of its own, checks each element,
// and prints what changes. Kill any of them: the others go on. All take -driver
// auto|real|sim, -dir FOLDER, where they meet, and -name NAME. Without a command
// it runs a publisher and two followers for a moment.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"golang.org/x/sync/errgroup"
)

const usage = `usage: 11-ipc-server [FLAGS] [publish | follow | list]
flags come first; without a command a publisher and two followers run for a moment`

// options are the flags.
type options struct {
	driver, dir, name  string
	step, most, rounds int
	every              time.Duration
	followers          int
}

func (o options) socket() string { return filepath.Join(o.dir, "server") }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "11-ipc-server:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	var o options
	flags := flag.NewFlagSet("11-ipc-server", flag.ContinueOnError)
	flags.StringVar(&o.driver, "driver", "", "`auto`, real or sim (default: $CUVMM_DRIVER, or auto)")
	flags.StringVar(&o.dir, "dir", filepath.Join(os.TempDir(), fmt.Sprintf("cuvmm-%d", os.Getuid())), "the private `folder` in which the processes meet")
	flags.StringVar(&o.name, "name", "numbers", "the publication's `name`")
	flags.IntVar(&o.step, "step", 1<<18, "publish: how many `elements` the array grows by")
	flags.IntVar(&o.most, "most", 1<<21, "publish: at how many `elements` it shrinks to a quarter")
	flags.IntVar(&o.rounds, "rounds", 0, "publish: how many `times` it changes; 0 is until it is interrupted")
	flags.IntVar(&o.followers, "followers", 0, "publish: how many `followers` are waited for")
	flags.DurationVar(&o.every, "every", time.Second, "publish: the `time` between changes")
	flags.Usage = func() {
		fmt.Fprintln(flags.Output(), usage)
		flags.PrintDefaults()
	}
	if err := flags.Parse(args); err != nil {
		return err
	}
	switch {
	case o.step <= 0 || o.most < o.step || o.most > 1<<32 || o.rounds < 0 || o.followers < 0 || o.every < 0:
		return fmt.Errorf("-step must be positive, -most at least as much and at most %d, and the others not negative", 1<<32)
	case flags.NArg() == 0:
		return demonstrate(ctx, o, out)
	case flags.NArg() > 1:
		return fmt.Errorf("arguments %q: %s", flags.Args(), usage)
	}
	do := map[string]func(context.Context, *cuda.Device, options, io.Writer) error{
		"publish": serve, "follow": follow, "list": list,
	}[flags.Arg(0)]
	if do == nil {
		return fmt.Errorf("command %q: %s", flags.Arg(0), usage)
	}
	sys, err := auto.Open(auto.Options{Driver: auto.Choice(o.driver)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	dev, err := sys.Device(0)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(out, "process %d: %v, %v\n", os.Getpid(), sys.Driver(), dev); err != nil {
		return err
	}
	return do(ctx, dev, o, out)
}

// connect is a client of the publisher.
func connect(ctx context.Context, o options) (*publish.Client, error) {
	conn, err := peer.Dial(ctx, o.socket(), peer.Options{})
	if err != nil {
		return nil, err
	}
	return publish.NewClient(conn), nil
}

func list(ctx context.Context, _ *cuda.Device, o options, out io.Writer) (err error) {
	client, err := connect(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	all, err := client.List(ctx)
	if err != nil {
		return err
	}
	for _, p := range all {
		_, werr := fmt.Fprintf(out, "%-16s length %d, of %v, in %d MiB, generation %d\n", p.Name, p.Length, p.Element, p.Bytes>>20, p.Generation)
		err = errors.Join(err, werr)
	}
	return err
}

// demonstrate runs a publisher and two followers, each in a process of its own.
func demonstrate(ctx context.Context, o options, out io.Writer) (err error) {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "11-ipc-server")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	var lines locked
	lines.out = out
	all, alive := errgroup.WithContext(ctx) // one that fails ends the others
	start := func(args ...string) error {
		cmd := exec.CommandContext(alive, self, append([]string{"-driver", o.driver, "-dir", dir, "-name", o.name}, args...)...)
		cmd.Stdout, cmd.Stderr = &lines, &lines
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
		cmd.WaitDelay = 20 * time.Second
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
		for alive.Err() == nil { // until the publisher serves
			if _, err := os.Lstat(filepath.Join(dir, "server")); err == nil {
				return errors.Join(start("follow"), start("follow"))
			}
			time.Sleep(time.Millisecond)
		}
		return nil
	})
	err = all.Wait()
	return unlessEnded(ctx, cmp.Or(lines.failed(), err))
}

// locked lets several processes write, a line or more at a time.
type locked struct {
	mu  sync.Mutex
	out io.Writer
	err error
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, err := l.out.Write(p)
	l.err = cmp.Or(l.err, err)
	return n, err
}

// failed is why what a process wrote went nowhere: the process itself only hears
// of a broken pipe.
func (l *locked) failed() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}
