// Command embeddings publishes a table that grows in place, for a Python process that
// trains on it:
//
//	go run ./python/samples/embeddings -dir FOLDER
//	python3 python/samples/train.py FOLDER/table FOLDER/model
//
// A row has eight features and a label, which is their sum, each times its number.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand"
	"os"
	"os/signal"
	"time"

	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/vmm"
)

const features = 8

var (
	dir    = flag.String("dir", "", "the private `folder` of the socket, which is made")
	rounds = flag.Int("rounds", 30, "how many `times` the table grows; 0 is until an interrupt")
	rows   = flag.Int("rows", 5000, "how many `rows` it grows by")
	every  = flag.Duration("every", 100*time.Millisecond, "the `time` between")
)

func main() {
	flag.Parse()
	if *dir == "" || *rows < 1 || *rounds < 0 || flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "embeddings: -dir %q -rows %d -rounds %d %q: name a folder, at least one row, no negative rounds, and nothing else\n", *dir, *rows, *rounds, flag.Args())
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "embeddings:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	closing := func(c interface{ Close() error }) { err = errors.Join(err, c.Close()) }
	sys, err := auto.Open(auto.Options{})
	if err != nil {
		return err
	}
	defer closing(sys)
	dev, err := sys.Device(0)
	if err != nil {
		return err
	}
	table, err := vmm.NewArray[float32](dev, vmm.BufferOptions{Reserve: 1 << 30, Memory: vmm.Properties{Handles: vmm.PosixFD}})
	if err != nil {
		return err
	}
	defer closing(table)
	server := publish.NewServer(publish.ServerOptions{})
	defer closing(server)
	published, err := publish.Array(server, "embeddings", table)
	if err != nil {
		return err
	}
	listener, err := peer.Listen(*dir, "table", peer.Options{})
	if err != nil {
		return err
	}
	defer closing(listener)
	go func() { _ = server.Serve(context.Background(), listener) }() // ends with the listener
	if _, err := fmt.Fprintln(os.Stdout, "waiting for a follower at", listener.Path()); err != nil {
		return err
	}
	if err := published.AwaitFollowers(ctx, 1); err != nil {
		return err
	}
	for round := 0; (*rounds == 0 || round < *rounds) && ctx.Err() == nil; round++ {
		if _, err := table.Append(nil, some(*rows)); err != nil {
			return err
		}
		if err := published.Announce(context.Background(), table.Len()); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(os.Stdout, "the table has", table.Len()/(features+1), "rows"); err != nil {
			return err
		}
		time.Sleep(*every)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return errors.Join(published.Settle(ctx), published.Withdraw())
}

// some makes rows of random features.
func some(n int) []float32 {
	all := make([]float32, 0, n*(features+1))
	for range n {
		label := float32(0)
		for i := range features {
			x := 2*rand.Float32() - 1
			all = append(all, x)
			label += float32(i+1) * x
		}
		all = append(all, label)
	}
	return all
}
