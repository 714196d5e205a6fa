// Command serve predicts with a model that a Python process trains and publishes:
//
//	go run ./python/samples/serve -socket FOLDER/model
//
// A line of standard input has eight features, and gets a line with the model's
// version and its prediction. New weights are in use as soon as they are announced. A
// trainer that dies and starts again is followed again.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"

	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/handles/publish"
)

const features = 8

var socket = flag.String("socket", "", "the `path` of the trainer's socket")

func main() {
	flag.Parse()
	if *socket == "" || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "serve: name the trainer's socket with -socket, and nothing else")
		os.Exit(2)
	}
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "serve:", err)
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
	client, err := publish.Dial(ctx, *socket, publish.DialOptions{ComeBack: &publish.ComeBack{}})
	if err != nil {
		return err
	}
	defer closing(client)
	model, err := publish.Follow[float32](ctx, client, dev, "model", publish.FollowOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	defer closing(model)
	if err := model.Next(ctx); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	followed := make(chan error, 1)
	go func() {
		for {
			if err := model.Next(ctx); err != nil {
				followed <- err // the last model serves on
				return
			}
		}
	}()
	defer func() {
		stop()
		if e := <-followed; !errors.Is(e, context.Canceled) && !errors.Is(e, publish.ErrWithdrawn) {
			err = errors.Join(err, e)
		}
	}()
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		said, err := predict(model, in.Text())
		if err != nil {
			said = "error: " + err.Error()
		}
		if _, err := fmt.Fprintln(os.Stdout, said); err != nil {
			return err
		}
	}
	return in.Err()
}

// predict uses the newest weights, which are the last of the publication.
func predict(model *publish.Follower[float32], line string) (string, error) {
	var x [features]float32
	if _, err := fmt.Sscan(line, &x[0], &x[1], &x[2], &x[3], &x[4], &x[5], &x[6], &x[7]); err != nil {
		return "", fmt.Errorf("%q: pass %d numbers", line, features)
	}
	n := model.Len()
	newest, err := model.Array().Slice(n-features, n)
	if err != nil {
		return "", err
	}
	var weights [features]float32
	if err := newest.CopyTo(nil, weights[:]); err != nil {
		return "", err
	}
	sum := float32(0)
	for i, w := range weights {
		sum += w * x[i]
	}
	return fmt.Sprintf("version %d predicts %.3f", n/features, sum), nil
}
