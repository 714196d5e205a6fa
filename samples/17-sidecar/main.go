// Command 17-sidecar kills a publisher in the middle of its work, and a second process
// takes its publication over: the reader goes on at the same address.
//
//	go run ./samples/17-sidecar [-driver auto|real|sim]
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/samples/internal/app"
)

const step = 1 << 18 // elements of a round

var sample = app.Sample{
	Name:  "17-sidecar",
	Shows: "a publication that outlives its publisher",
	Next:  "18-two-tenants: processes that hand one GPU to each other",
	Run:   run,
}

func main() { app.Main(sample) }

func run(e *app.Env) (err error) {
	dir := e.Flags.String("dir", "", "the private `folder` in which the processes meet (default: a temporary one)")
	if err := e.Parse(); err != nil {
		return err
	}
	if *dir == "" {
		if *dir, err = os.MkdirTemp("", "17-sidecar"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(*dir)) }()
	}
	if err := e.Open(); err != nil {
		return err
	}
	switch e.Role {
	case "publisher":
		return publisher(e, *dir)
	case "sidecar":
		return sidecar(e, *dir)
	}
	return reader(e, *dir)
}

// reader starts both, kills the publisher after some rounds, and reads on.
func reader(e *app.Env, dir string) (err error) {
	ctx, stop := context.WithCancel(e.Context)
	var started []*exec.Cmd
	defer func() {
		stop()
		for _, c := range started {
			_ = c.Wait() // interrupted, or waited for already
		}
	}()
	for _, role := range []string{"publisher", "sidecar"} {
		cmd, err := e.Again(ctx, role, "-dir", dir)
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			return err
		}
		started = append(started, cmd)
	}
	first := started[0]
	client, f, err := follow(e, dir)
	if err != nil {
		return err
	}
	defer app.Close(client, &err)
	defer app.Close(f, &err)
	at := f.Array().Ptr()
	for killed := false; f.Len() < 8*step; {
		if err := f.Next(ctx); err != nil && !errors.Is(err, publish.ErrUnfinished) {
			return err
		}
		if !killed && f.Len() >= 4*step {
			killed = true
			e.Line("reader", "kills the publisher after %d elements", f.Len())
			if err := first.Process.Kill(); err != nil {
				return err
			}
			_ = first.Wait() // killed
		}
	}
	got := make([]uint32, f.Len())
	if err := f.Array().All().CopyTo(nil, got); err != nil {
		return err
	}
	for i, v := range got {
		if v != uint32(i) {
			return fmt.Errorf("element %d is %d", i, v)
		}
	}
	e.Line("reader", "has %d elements from both, at the same address: %v", len(got)/step*step, at == f.Array().Ptr())
	return nil
}
