// Command peer is the Go side of the Python package's tests. It reads commands from
// standard input, one a line, and prints the result of each.
//
//	serve FOLDER NAME          serves publications on a socket
//	publish NAME LENGTH        publishes an array of uint32, element i of which is i
//	grow NAME LENGTH           appends up to a length, and announces
//	read NAME INDEX            prints an element
//	shrink NAME LENGTH         shows fewer elements
//	followers NAME             prints how many follow, and the bytes that they pin
//	withdraw NAME              ends the publication
//	follow SOCKET NAME         follows, and prints each generation, length, sum
//	track SOCKET NAME          the same across publishers, until one withdraws
//	inherit SOCKET NAME        follows, prints "following", and takes over when the publisher dies, or prints
//	                           "not permitted"
//	keep BROKER SOCKET NAME LENGTH
//	                           serves an array that a broker keeps, and prints whether anything was announced
//	                           before, and whether it is to be written anew; or "incomplete"
//	anew BROKER SOCKET NAME LENGTH
//	                           the same, and writes anew what was half written
//	uniform NAME LENGTH        publishes an array of uint32, all of whose elements are 0
//	rewrite TIMES              rewrites "table" in two halves, and announces it, so often; 0 is for ever
//	sleep TIMES                suspends the memory of "table", resumes it, and rewrites it, so often
//	turn TIMES                 rewrites the halves of "table" in turn, so often; 0 is for ever
//	half                       rewrites the first half of "table", and announces nothing
//	exclude                    rewrites "table" once, without the followers that are late
//	late SOCKET NAME           follows, prints "holds", and how that ends
//	check SOCKET NAME TIMES    follows, and prints how many of so many reads were mixtures
//	write SOCKET NAME VALUE    follows for writing, and sets the first element
//	send SOCKET LENGTH         waits for a process on a socket, and sends it an array
//	fail SOCKET LENGTH         the same, after it failed to send a closed array
//	save PATH LENGTH           saves such an array as the tensor "all", and its first 3 elements as "first"
//	lease LENGTH               leases an array by fabric handles, and prints the offer
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/load"
	"github.com/cuvmm/cuvmm/vmm"
)

// most is the room of every array, in elements.
const most = 64 << 20

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stdout, "failed", err)
		os.Exit(1)
	}
}

// program is what the commands work on.
type program struct {
	dev      *cuda.Device
	stream   *cuda.Stream
	server   *publish.Server
	listener *peer.Listener
	arrays   map[string]*vmm.Array[uint32]
	shown    map[string]*publish.Publication
	leases   []*handles.Lease
	kept     []io.Closer // by a broker, behind its client
}

func run() error {
	sys, err := auto.Open(auto.Options{})
	if err != nil {
		return err
	}
	dev, err := sys.Device(0)
	if err != nil {
		return err
	}
	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	p := &program{dev: dev, stream: stream, server: publish.NewServer(publish.ServerOptions{}), arrays: map[string]*vmm.Array[uint32]{}, shown: map[string]*publish.Publication{}}
	fmt.Fprintln(os.Stdout, "ready")
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		said, err := p.do(context.Background(), strings.Fields(in.Text()))
		if err != nil {
			said = "error " + strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		fmt.Fprintln(os.Stdout, said)
	}
	return errors.Join(in.Err(), p.close(), stream.Close(), sys.Close())
}

func (p *program) do(ctx context.Context, words []string) (string, error) {
	arg := func(i int) string {
		if i < len(words) {
			return words[i]
		}
		return ""
	}
	n, _ := strconv.Atoi(words[len(words)-1])
	name := arg(1)
	switch arg(0) {
	case "serve":
		return "done", p.serve(ctx, name, arg(2))
	case "publish":
		return "done", p.publish(ctx, name, n)
	case "grow":
		return p.grow(ctx, name, n)
	case "read":
		return p.read(name, n)
	case "shrink":
		return "done", p.shown[name].Shrink(n)
	case "followers":
		s := p.shown[name].Stats()
		return fmt.Sprint(len(s.Followers)), nil
	case "withdraw":
		return "done", p.shown[name].Withdraw()
	case "follow":
		return "done", p.follow(ctx, name, arg(2))
	case "track":
		return "done", p.track(ctx, name, arg(2))
	case "inherit":
		return p.inherit(ctx, name, arg(2))
	case "keep", "anew":
		return p.keep(ctx, name, arg(2), arg(3), n, arg(0) == "anew")
	case "uniform":
		return "done", p.uniform(ctx, name, n)
	case "turn":
		return "done", p.turn(ctx, n)
	case "rewrite":
		return "done", p.rewrite(ctx, n, publish.RewriteOptions{})
	case "sleep":
		return "done", p.sleep(ctx, n)
	case "exclude":
		return "done", p.rewrite(ctx, 1, publish.RewriteOptions{ExcludeAfter: 50 * time.Millisecond})
	case "late":
		return p.late(ctx, name, arg(2))
	case "half":
		return "done", errors.Join(p.shown["table"].Rewrite(ctx, publish.RewriteOptions{}), p.half(0), p.stream.Synchronize())
	case "check":
		return p.check(ctx, name, arg(2), n)
	case "write":
		return "done", p.write(ctx, name, arg(2), uint32(n))
	case "send":
		return "done", p.send(ctx, name, n, nil)
	case "fail":
		return "done", p.send(ctx, name, n, p.failToSend)
	case "save":
		return "done", p.save(ctx, name, n)
	case "lease":
		return p.lease(n)
	}
	return "", fmt.Errorf("the command %q", words)
}

func (p *program) serve(ctx context.Context, folder, name string) error {
	l, err := peer.Listen(folder, name, peer.Options{})
	if err != nil {
		return err
	}
	p.listener = l
	go func() { _ = p.server.Serve(ctx, l) }() // ends with the listener
	return nil
}

// array makes an array of uint32 in which element i is i.
func (p *program) array(length int) (*vmm.Array[uint32], error) {
	a, err := vmm.NewArray[uint32](p.dev, vmm.BufferOptions{Reserve: 4 * most, Memory: vmm.Properties{Handles: vmm.PosixFD}})
	if err != nil {
		return nil, err
	}
	return a, p.fill(a, length)
}

// fill appends elements up to a length.
func (p *program) fill(a *vmm.Array[uint32], length int) error {
	values := make([]uint32, length-a.Len())
	for i := range values {
		values[i] = uint32(a.Len() + i)
	}
	_, err := a.Append(p.stream, values)
	return err
}

func (p *program) save(ctx context.Context, path string, length int) error {
	a, err := p.array(length)
	if err != nil {
		return err
	}
	return errors.Join(load.SaveSafetensors(ctx, load.SaveOptions{}, p.stream, path,
		load.Saving{Name: "first", Element: handles.Uint32, Shape: []int{3}, From: a.Buffer().Ptr()},
		load.Saving{Name: "all", Element: handles.Uint32, Shape: []int{length}, From: a.Buffer().Ptr()}), a.Close())
}

func (p *program) publish(ctx context.Context, name string, length int) error {
	a, err := p.array(length)
	if err != nil {
		return err
	}
	p.arrays[name] = a
	if p.shown[name], err = publish.Array(p.server, name, a, publish.PublishOptions{Description: []byte("made by Go")}); err != nil {
		return err
	}
	return p.shown[name].Announce(ctx, length, p.stream)
}

func (p *program) read(name string, at int) (string, error) {
	part, err := p.arrays[name].Slice(at, at+1)
	if err != nil {
		return "", err
	}
	var value [1]uint32
	err = part.CopyTo(p.stream, value[:])
	return fmt.Sprint(value[0]), err
}

func (p *program) grow(ctx context.Context, name string, length int) (string, error) {
	if err := p.fill(p.arrays[name], length); err != nil {
		return "", err
	}
	return "done", p.shown[name].Announce(ctx, length, p.stream)
}

func (p *program) follow(ctx context.Context, socket, name string) error {
	return p.following(ctx, socket, name, true, func(f *publish.Follower[uint32]) error {
		for {
			if err := f.Next(ctx); errors.Is(err, publish.ErrWithdrawn) || errors.Is(err, peer.ErrGone) {
				return nil
			} else if err != nil {
				return err
			}
			if err := p.show(f); err != nil {
				return err
			}
		}
	})
}

// show prints what a follower has.
func (p *program) show(f *publish.Follower[uint32]) error {
	values := make([]uint32, f.Len())
	if err := f.Array().All().CopyTo(p.stream, values); err != nil {
		return err
	}
	sum := 0
	for _, v := range values {
		sum += int(v)
	}
	fmt.Fprintln(os.Stdout, f.Generation(), len(values), sum)
	return nil
}

// lasting follows across the deaths of publishers.
func (p *program) lasting(ctx context.Context, socket, name string, o publish.FollowOptions) (*publish.Client, *publish.Follower[uint32], error) {
	k, err := publish.Dial(ctx, socket, publish.DialOptions{ComeBack: &publish.ComeBack{}})
	if err != nil {
		return nil, nil, err
	}
	f, err := publish.Follow[uint32](ctx, k, p.dev, name, o)
	if err != nil {
		return nil, nil, errors.Join(err, k.Close())
	}
	return k, f, nil
}

func (p *program) inherit(ctx context.Context, socket, name string) (string, error) {
	k, f, err := p.lasting(ctx, socket, name, publish.FollowOptions{KeepDescriptors: true, Reserve: 4 * most})
	if err != nil {
		return "", err
	}
	if err := errors.Join(f.Next(ctx), f.Release()); err != nil { // a publisher that rewrites does not wait for it
		return "", errors.Join(err, f.Close(), k.Close())
	}
	fmt.Fprintln(os.Stdout, "following")
	shown, err := publish.TakeOver(ctx, p.server, f, publish.TakeOverOptions{})
	if errors.Is(err, cuda.ErrNotPermitted) {
		return "not permitted", errors.Join(f.Close(), k.Close())
	}
	if err != nil {
		return "", errors.Join(err, f.Close(), k.Close())
	}
	p.shown[name], p.arrays[name] = shown, f.Array()
	return fmt.Sprint(f.Array().Len()), k.Close()
}

func (p *program) track(ctx context.Context, socket, name string) error {
	k, f, err := p.lasting(ctx, socket, name, publish.FollowOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	for err == nil {
		if err = f.Next(ctx); err == nil {
			err = p.show(f)
		}
	}
	if errors.Is(err, publish.ErrWithdrawn) {
		err = nil
	}
	return errors.Join(err, f.Close(), k.Close())
}

func (p *program) write(ctx context.Context, socket, name string, value uint32) error {
	return p.following(ctx, socket, name, false, func(f *publish.Follower[uint32]) error {
		if err := f.Next(ctx); err != nil {
			return err
		}
		first, err := f.Array().Slice(0, 1)
		if err != nil {
			return err
		}
		if err := first.CopyFrom(p.stream, []uint32{value}); err != nil {
			return err
		}
		return p.stream.Synchronize()
	})
}

func (p *program) following(ctx context.Context, socket, name string, readOnly bool, do func(*publish.Follower[uint32]) error) error {
	c, err := peer.Dial(ctx, socket, peer.Options{})
	if err != nil {
		return err
	}
	k := publish.NewClient(c)
	f, err := publish.Follow[uint32](ctx, k, p.dev, name, publish.FollowOptions{ReadOnly: readOnly})
	if err != nil {
		return errors.Join(err, k.Close())
	}
	return errors.Join(do(f), f.Close(), k.Close())
}

// failToSend sends an array that is closed.
func (p *program) failToSend(ctx context.Context, c *peer.Conn) error {
	a, err := p.array(1)
	if err != nil {
		return err
	}
	if err := a.Close(); err != nil {
		return err
	}
	if err := handles.SendArray(ctx, c, a); !errors.Is(err, cuda.ErrClosed) {
		return fmt.Errorf("a closed array: %w", err)
	}
	return nil
}

// send sends an array to the process that connects, after what comes first.
func (p *program) send(ctx context.Context, socket string, length int, first func(context.Context, *peer.Conn) error) error {
	l, err := peer.Listen(filepath.Dir(socket), filepath.Base(socket), peer.Options{})
	if err != nil {
		return err
	}
	fmt.Fprintln(os.Stdout, "listening")
	c, err := l.Accept(ctx)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	if first != nil {
		if err := first(ctx, c); err != nil {
			return errors.Join(err, c.Close(), l.Close())
		}
	}
	a, err := p.array(length)
	if err == nil {
		err = errors.Join(p.stream.Synchronize(), c.Send(ctx, peer.Message{Kind: 7, Body: []byte("hello")}), handles.SendArray(ctx, c, a), a.Close())
	}
	return errors.Join(err, c.Close(), l.Close())
}

func (p *program) lease(length int) (string, error) {
	a, err := vmm.NewArray[uint32](p.dev, vmm.BufferOptions{Reserve: 4 * most, Memory: vmm.Properties{Handles: vmm.Fabric}})
	if err != nil {
		return "", err
	}
	if err := errors.Join(p.fill(a, length), p.stream.Synchronize()); err != nil {
		return "", err
	}
	l, err := handles.LeaseArray(a, handles.LeaseOptions{})
	if err != nil {
		return "", err
	}
	p.leases = append(p.leases, l)
	text, err := l.Offer().MarshalText()
	return string(text), errors.Join(err, a.Close())
}

// close gives everything back.
func (p *program) close() (err error) {
	if p.listener != nil {
		err = p.listener.Close()
	}
	err = errors.Join(err, p.server.Close())
	for _, l := range p.leases {
		err = errors.Join(err, l.Close())
	}
	for _, a := range p.arrays {
		err = errors.Join(err, a.Close())
	}
	for _, k := range slices.Backward(p.kept) {
		err = errors.Join(err, k.Close())
	}
	return err
}
