// Command 10-ipc shares GPU memory with a child process while it grows. The
// parent streams a file into an array; the child follows the array in a mapping
// of its own, hashes what arrives, and writes the SHA-256 into memory that the
// parent shared for the reply. No byte of the file goes through a pipe.
//
//	go run ./samples/10-ipc [-driver auto|real|sim] [-step BYTES] [FILE]
//
// Without a file it reads its own executable.
package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/vmm"
)

// The names that the two processes know each other's memory by.
const (
	fileName  = "file"
	replyName = "reply"
)

// limit is how long the whole may take.
const limit = 5 * time.Minute

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "10-ipc:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("10-ipc", flag.ContinueOnError)
	driver := flags.String("driver", "", "`auto`, real or sim (default: $CUVMM_DRIVER, or auto)")
	step := flags.Int("step", 1<<20, "how many `bytes` to read at a time")
	child := flags.Bool("child", false, "be the child (the parent says so)")
	flags.Usage = func() {
		fmt.Fprintln(flags.Output(), "usage: 10-ipc [-driver auto|real|sim] [-step BYTES] [FILE]")
		flags.PrintDefaults()
	}
	if err := flags.Parse(args); err != nil {
		return err
	}
	switch {
	case flags.NArg() > 1:
		return fmt.Errorf("%d files given: name one", flags.NArg())
	case *step <= 0 || *step > 1<<30:
		return fmt.Errorf("a step of %d bytes: use 1 to %d", *step, 1<<30)
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
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if *child {
		return follow(ctx, dev, os.NewFile(3, "parent"), out)
	}
	in, name, err := open(flags.Arg(0))
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	fmt.Fprintf(out, "driver     %v\n", sys.Driver())
	fmt.Fprintf(out, "device     %v\n", dev)
	fmt.Fprintf(out, "input      %s\n", name)
	return serve(ctx, dev, in, *step, []string{"-child", "-driver", *driver, "-step", strconv.Itoa(*step)}, out)
}

// open is the input and its name for people.
func open(name string) (*os.File, string, error) {
	if name == "" {
		self, err := os.Executable()
		if err != nil {
			return nil, "", err
		}
		name = self
	}
	f, err := os.Open(name)
	return f, name, err
}

// serve is the parent: it starts the child, streams the input into an array
// that the child follows, and reads the child's reply.
func serve(ctx context.Context, dev *cuda.Device, in io.Reader, step int, child []string, out io.Writer) (err error) {
	array, err := vmm.NewArray[byte](dev, vmm.BufferOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, array.Close()) }()
	reply, err := vmm.NewArray[byte](dev, vmm.BufferOptions{Reserve: sha256.Size})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, reply.Close()) }()
	if err := reply.Resize(nil, sha256.Size); err != nil {
		return err
	}

	server := publish.NewServer(publish.ServerOptions{})
	defer func() { err = errors.Join(err, server.Close()) }()
	file, err := publish.Array(server, fileName, array)
	if err != nil {
		return err
	}
	answer, err := publish.Array(server, replyName, reply)
	if err != nil {
		return err
	}
	if err := answer.Announce(ctx, sha256.Size, nil); err != nil {
		return err
	}
	fmt.Fprintf(out, "parent     process %d, the array is at %v\n", os.Getpid(), array.Ptr())

	alive, ended := context.WithCancel(ctx)
	defer ended()
	wait, err := start(ctx, server, child, out, ended)
	if err != nil {
		return err
	}
	want, err := stream(alive, dev, in, step, array, file)
	if err == nil {
		err = end(alive, file)
	}
	if err != nil && alive.Err() == nil {
		_ = server.Close() // the child ends too, and says no more than that it had to
		_ = wait()
		return err
	}
	if err = errors.Join(err, wait()); err != nil {
		return err
	}
	got := make([]byte, sha256.Size)
	if err := reply.All().CopyTo(nil, got); err != nil {
		return err
	}
	fmt.Fprintf(out, "reply      %x\n", got)
	if string(got) != string(want) {
		return fmt.Errorf("the child found SHA-256 %x, the input has %x", got, want)
	}
	_, err = fmt.Fprintln(out, "verified   the child's mapping has the input's SHA-256")
	return err
}

// start runs this program again, connected by a pair of sockets of which the
// child inherits one. wait waits for its end, and ended is called then.
func start(ctx context.Context, server *publish.Server, args []string, out io.Writer, ended func()) (wait func() error, err error) {
	conn, far, err := peer.Pair(peer.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { _ = far.Close() }() // or the child's end would go unnoticed
	self, err := os.Executable()
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	cmd.ExtraFiles = []*os.File{far}
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	served := make(chan error, 1)
	go func() {
		served <- server.ServeConn(ctx, conn)
		ended()
	}()
	return func() error { return errors.Join(cmd.Wait(), <-served) }, nil
}

// stream appends the input and announces each piece, in the order of one stream.
// It returns the input's SHA-256.
func stream(ctx context.Context, dev *cuda.Device, in io.Reader, step int, array *vmm.Array[byte], p *publish.Publication) (sum []byte, err error) {
	s, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	hash := sha256.New()
	piece := make([]byte, step)
	for {
		n, err := io.ReadFull(in, piece)
		hash.Write(piece[:n])
		if n > 0 {
			if _, err := array.Append(s, piece[:n]); err != nil {
				return nil, err
			}
			if err := p.Announce(ctx, array.Len(), s); err != nil {
				return nil, err
			}
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return hash.Sum(nil), nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// end says that nothing follows, to a child that has everything.
func end(ctx context.Context, file *publish.Publication) error {
	if err := file.AwaitFollowers(ctx, 1); err != nil {
		return err
	}
	if err := file.Settle(ctx); err != nil {
		return err
	}
	return file.Withdraw()
}

// follow is the child.
func follow(ctx context.Context, dev *cuda.Device, parent *os.File, out io.Writer) (err error) {
	conn, err := peer.Inherit(parent, peer.Options{})
	if err != nil {
		return err
	}
	client := publish.NewClient(conn)
	defer func() { err = errors.Join(err, client.Close()) }()
	f, err := publish.Follow[byte](ctx, client, dev, fileName, publish.FollowOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	s, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()

	hash := sha256.New()
	have, changes := 0, 0
	for {
		// What is copied on the stream from here on comes behind the parent's.
		err := f.Next(ctx, s)
		if errors.Is(err, publish.ErrWithdrawn) {
			break
		}
		if err != nil {
			return err
		}
		part, err := f.Array().Slice(have, f.Len())
		if err != nil {
			return err
		}
		piece := make([]byte, part.Len())
		if err := part.CopyTo(s, piece); err != nil {
			return err
		}
		hash.Write(piece)
		have, changes = f.Len(), changes+1
	}
	reply, err := publish.Open[byte](ctx, client, dev, replyName, handles.ImportOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, reply.Close()) }()
	if err := reply.All().CopyFrom(nil, hash.Sum(nil)); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "child      process %d, the array is at %v: bytes %d, changes %d\n", os.Getpid(), f.Array().Ptr(), have, changes)
	return err
}
