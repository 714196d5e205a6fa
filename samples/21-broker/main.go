// Command 21-broker kills an engine in the middle of a request, and replaces the broker that has its
// weights. The engine's successor finds them where they were, loads nothing, and answers.
//
//	go run ./samples/21-broker [-driver auto|real|sim] [-size SIZE]
package main

import (
	"context"
	"errors"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/samples/internal/app"
)

var sample = app.Sample{
	Name:  "21-broker",
	Shows: "weights that outlive the engine that loaded them, and the broker that keeps them",
	Run:   run,
}

func main() { app.Main(sample) }

const (
	socket = "broker"
	limit  = time.Minute // for the other processes
)

func run(e *app.Env) (err error) {
	dir := e.Flags.String("dir", "", "the private `folder` in which the processes meet (default: a temporary one)")
	size := e.Size("size", "64MiB", "the `size` of the weights")
	if err := e.Parse(); err != nil {
		return err
	}
	if *dir == "" {
		top, err := os.MkdirTemp("", "21-broker")
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(top)) }()
		*dir = filepath.Join(top, "sockets")
	}
	if err := e.Open(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(e.Context, limit)
	defer cancel()
	switch e.Role {
	case "broker":
		return serve(ctx, e)
	case "engine":
		return engine(ctx, e, *dir, *size)
	}
	return keep(ctx, e, *dir, *size)
}

// keep is the keeper: it runs the broker, and has two engines answer, one after the other. "cuvmm serve" is the first half.
func keep(ctx context.Context, e *app.Env, dir string, size int) (err error) {
	l, err := peer.Listen(dir, socket, peer.Options{})
	if err != nil {
		return err
	}
	defer app.Close(l, &err)
	listening, err := l.File()
	if err != nil {
		return err
	}
	defer app.Close(listening, &err)
	k := keeper.New()
	defer app.Close(k, &err)
	replace := make(chan os.Signal)
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- k.Run(running, keeper.RunOptions{Restart: replace, Command: func() *exec.Cmd {
			c, err := e.Again(ctx, "broker", "-dir", dir)
			if err != nil {
				return &exec.Cmd{Err: err}
			}
			c.ExtraFiles = []*os.File{listening}
			return c
		}})
	}()
	defer func() {
		stop()
		err = errors.Join(err, <-ended)
	}()

	first, err := start(ctx, e, dir, size)
	if err != nil {
		return err
	}
	sum, err := first.ask(ctx, "the first request")
	if err != nil {
		return err
	}
	if err := first.c.Send(ctx, peer.Message{Kind: request, Body: []byte("the second request")}); err != nil {
		return err
	}
	if err := first.kill(); err != nil {
		return err
	}
	replace <- os.Interrupt
	e.Line("keeper", "killed the engine, process %d, in the middle of a request, and replaces the broker", first.cmd.Process.Pid)
	second, err := start(ctx, e, dir, size)
	if err != nil {
		return err
	}
	again, err := second.ask(ctx, "the second request")
	if err == nil {
		err = second.end()
	}
	if err != nil {
		return err
	}
	if sum != again {
		return errors.New("the successor has other weights: " + again + ", where the first had " + sum)
	}
	e.Line("verified", "both engines answered from the same weights, CRC-32 %s", sum)
	return nil
}

// worker is an engine's process.
type worker struct {
	cmd *exec.Cmd
	c   *peer.Conn
}

const request = 1 // the kind of messages

func start(ctx context.Context, e *app.Env, dir string, size int) (*worker, error) {
	c, theirs, err := peer.Pair(peer.Options{})
	if err != nil {
		return nil, err
	}
	cmd, err := e.Again(ctx, "engine", "-dir", dir, "-size", strconv.Itoa(size))
	if err == nil {
		cmd.ExtraFiles = []*os.File{theirs}
		err = cmd.Start()
	}
	if err = errors.Join(err, theirs.Close()); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &worker{cmd, c}, nil
}

// ask has an engine answer a request.
func (w *worker) ask(ctx context.Context, text string) (string, error) {
	if err := w.c.Send(ctx, peer.Message{Kind: request, Body: []byte(text)}); err != nil {
		return "", err
	}
	m, err := w.c.Receive(ctx)
	return string(m.Body), err
}

func (w *worker) kill() error {
	err := w.cmd.Process.Kill()
	_ = w.cmd.Wait() // killed
	return errors.Join(err, w.c.Close())
}

func (w *worker) end() error { return errors.Join(w.c.Close(), w.cmd.Wait()) }

// serve is the broker. It is told to end by its keeper.
func serve(ctx context.Context, e *app.Env) (err error) {
	c, err := peer.Inherit(os.NewFile(3, "the keeper"), peer.Options{})
	if err != nil {
		return err
	}
	l, err := peer.InheritListener(os.NewFile(4, "the socket"), peer.Options{})
	if err != nil {
		return err
	}
	b, err := broker.New(ctx, e.System, broker.Options{Keeper: keeper.NewClient(c)})
	if err != nil {
		return err
	}
	defer app.Close(b, &err)
	return b.Serve(ctx, l)
}

// engine answers requests from its weights, which it loads if no other engine has.
func engine(ctx context.Context, e *app.Env, dir string, size int) (err error) {
	requests, err := peer.Inherit(os.NewFile(3, "requests"), peer.Options{})
	if err != nil {
		return err
	}
	defer app.Close(requests, &err)
	k, err := broker.Dial(ctx, filepath.Join(dir, socket), broker.DialOptions{Wait: true})
	if err != nil {
		return err
	}
	defer app.Close(k, &err)
	began := time.Now()
	weights, err := k.Ensure(ctx, e.Device, "weights", broker.CreateOptions{Bytes: size}, func(ctx context.Context, w *broker.Writer) (*broker.Object, error) {
		return load(ctx, e, w, size)
	})
	if err != nil {
		return err
	}
	defer app.Close(weights, &err)
	what := "found the weights that process " + strconv.Itoa(weights.About().PID) + " loaded"
	if weights.About().PID == os.Getpid() {
		what = "loaded the weights"
	}
	e.Line("engine", "process %d %s, %d bytes, in %v", os.Getpid(), what, size, time.Since(began).Round(10*time.Microsecond))
	for {
		if _, err := requests.Receive(ctx); err != nil {
			if errors.Is(err, peer.ErrGone) {
				return nil
			}
			return err
		}
		_, memory, err := weights.Tensor("weights")
		if err != nil {
			return err
		}
		bytes := make([]byte, size)
		if err := memory.CopyTo(nil, bytes); err != nil {
			return err
		}
		answer := strconv.FormatUint(uint64(crc32.ChecksumIEEE(bytes)), 16)
		if err := requests.Send(ctx, peer.Message{Kind: request, Body: []byte(answer)}); err != nil {
			return err
		}
	}
}

// load fills and commits the weights.
func load(ctx context.Context, e *app.Env, w *broker.Writer, size int) (o *broker.Object, err error) {
	stream, err := e.Device.NewStream(cuda.StreamOptions{})
	if err != nil {
		return nil, err
	}
	defer app.Close(stream, &err)
	bytes := make([]byte, size)
	for i := range bytes {
		bytes[i] = byte(i * i >> 8)
	}
	if err := stream.Upload(w.Buffer().Ptr(), bytes); err != nil {
		return nil, err
	}
	m := &handles.Manifest{Bytes: size, Tensors: []handles.Tensor{{Name: "weights", Element: handles.Uint8, Shape: []int{size}}}}
	return w.Commit(ctx, m, stream)
}
