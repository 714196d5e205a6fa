package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

// What a tenant is asked to do. It replies with the same kind.
const (
	wake  uint16 = iota + 1
	work         // check what is there, and write something else
	sleep        // at first, once there is something to suspend
)

// reply says how long the tenant took, and how much host memory it has.
type reply struct {
	Took time.Duration
	Host int
}

// tenant is another process, as the first one sees it.
type tenant struct {
	number            int
	cmd               *exec.Cmd
	conn              *peer.Conn
	host, hostAtFirst int
}

func start(ctx context.Context, e *app.Env, o options, number int) (*tenant, error) {
	conn, far, err := peer.Pair(peer.Options{})
	if err != nil {
		return nil, err
	}
	cmd, err := e.Again(ctx, "tenant", "-folder", o.folder, "-mib", strconv.Itoa(o.mib), "-number", strconv.Itoa(number))
	if err != nil {
		return nil, errors.Join(err, conn.Close(), far.Close())
	}
	cmd.ExtraFiles = []*os.File{far}
	if err := errors.Join(cmd.Start(), far.Close()); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &tenant{number: number, cmd: cmd, conn: conn}, nil
}

// ask has the tenant do something, and waits until that is done.
func (t *tenant) ask(ctx context.Context, what uint16) (r reply, err error) {
	if err := t.conn.Send(ctx, peer.Message{Kind: what}); err != nil {
		return r, err
	}
	m, err := t.conn.Receive(ctx)
	if err != nil {
		return r, fmt.Errorf("tenant %d: %w", t.number, err)
	}
	if err := json.Unmarshal(m.Body, &r); err != nil {
		return r, err
	}
	if what == sleep {
		if t.host = r.Host; t.hostAtFirst == 0 {
			t.hostAtFirst = r.Host
		}
	}
	return r, nil
}

// end closes the connection, at which the tenant ends.
func (t *tenant) end(ctx context.Context) error {
	err := errors.Join(t.conn.Close(), t.cmd.Wait())
	if ctx.Err() != nil {
		return nil // another error came first
	}
	return err
}

// renter is the tenant itself.
type renter struct {
	e       *app.Env
	stream  *cuda.Stream
	weights *vmm.Array[uint32] // which stay the same
	cache   *vmm.Array[uint32] // which each turn writes anew
	sums    *vmm.Array[uint64]
	fill    *cuda.Kernel
	sum     *cuda.Kernel
	seed    uint32
	turn    uint32
	asleep  *vmm.Suspension
}

// rent is the process of a tenant: three quarters of its memory are weights, the rest a cache.
func rent(e *app.Env, o options) (err error) {
	conn, err := peer.Inherit(os.NewFile(3, "parent"), peer.Options{})
	if err != nil {
		return err
	}
	defer app.Close(conn, &err)
	if err := e.Offer(); err != nil { // cuvmm top shows what sleeps
		return err
	}
	r := &renter{e: e, seed: uint32(o.number) << 16}
	array := func(name string, bytes int) *vmm.Array[uint32] {
		if err != nil {
			return nil
		}
		var a *vmm.Array[uint32]
		a, err = vmm.NewArray[uint32](e.Device, vmm.BufferOptions{Reserve: bytes, Chunks: vmm.FixedChunks(min(bytes, 32*mib)), Name: name, Tag: "tenant"})
		if err == nil {
			_, err = a.AppendUndefined(bytes / 4)
		}
		return a
	}
	r.weights, r.cache = array("weights", o.mib*mib/4*3), array("cache", o.mib*mib/4)
	if err != nil {
		return err
	}
	defer app.Close(r.weights, &err)
	defer app.Close(r.cache, &err)
	if r.sums, err = vmm.NewArray[uint64](e.Device, vmm.BufferOptions{}); err != nil {
		return err
	}
	defer app.Close(r.sums, &err)
	if r.stream, err = e.Device.NewStream(cuda.StreamOptions{}); err != nil {
		return err
	}
	defer app.Close(r.stream, &err)
	module, err := e.Device.LoadModule(kernels.Basic)
	if err != nil {
		return err
	}
	defer app.Close(module, &err)
	if r.fill, err = module.Kernel(kernels.Fill); err != nil {
		return err
	}
	if r.sum, err = module.Kernel(kernels.Sum); err != nil {
		return err
	}
	if err := errors.Join(r.write(r.weights, r.seed), r.write(r.cache, r.seed+1), r.check(r.weights, r.seed)); err != nil {
		return err
	}
	return r.serve(e.Context, conn)
}

// serve does what the first process asks for, until that closes the connection.
func (r *renter) serve(ctx context.Context, conn *peer.Conn) error {
	for {
		m, err := conn.Receive(ctx)
		if errors.Is(err, peer.ErrGone) {
			return nil
		}
		if err != nil {
			return err
		}
		began := time.Now()
		switch m.Kind {
		case wake:
			err = r.wake(ctx)
		case work:
			err = r.work()
		case sleep:
			// All work that is under way is waited for, then the bytes go to the host.
			r.asleep, err = vmm.Suspend(ctx, vmm.SuspendOptions{}, vmm.Tagged(r.e.System, "tenant")...)
		}
		if err != nil {
			return err
		}
		body, err := json.Marshal(reply{Took: time.Since(began), Host: resident()})
		if err != nil {
			return err
		}
		if err := conn.Send(ctx, peer.Message{Kind: m.Kind, Body: body}); err != nil {
			return err
		}
	}
}

// wake resumes the weights first, as a server would that can begin with them.
func (r *renter) wake(ctx context.Context) error {
	// While another tenant has the memory Resume waits, so long at most.
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := r.asleep.Resume(ctx, r.weights); err != nil {
		return err
	}
	return r.asleep.Resume(ctx)
}

// work checks that every byte is what it was before the tenant slept.
func (r *renter) work() error {
	if err := errors.Join(r.check(r.weights, r.seed), r.check(r.cache, r.seed+1+r.turn)); err != nil {
		return fmt.Errorf("turn %d: %w", r.turn, err)
	}
	r.turn++
	return r.write(r.cache, r.seed+1+r.turn)
}

// piece is how many elements have a sum of their own.
const piece = mib

// first returns the first element of a piece. The others count up from it.
func first(seed uint32, i int) uint32 { return (seed<<12 + uint32(i)) * 2654435761 >> 1 }

func (r *renter) write(a *vmm.Array[uint32], seed uint32) error {
	for i := range a.Len() / piece {
		at := a.Ptr() + cuda.Ptr(4*i*piece)
		if err := r.fill.Launch(r.stream, cuda.Threads(piece), at, uint64(piece), first(seed, i), uint32(1)); err != nil {
			return err
		}
	}
	return r.stream.Synchronize()
}

func (r *renter) check(a *vmm.Array[uint32], seed uint32) error {
	n := a.Len() / piece
	if err := r.sums.Resize(r.stream, n); err != nil {
		return err
	}
	if err := r.sums.All().Zero(r.stream); err != nil {
		return err
	}
	for i := range n {
		at := a.Ptr() + cuda.Ptr(4*i*piece)
		if err := r.sum.Launch(r.stream, cuda.Threads(piece), at, uint64(piece), r.sums.Ptr()+cuda.Ptr(8*i)); err != nil {
			return err
		}
	}
	sums := make([]uint64, n)
	if err := r.sums.All().CopyTo(r.stream, sums); err != nil {
		return err
	}
	for i, got := range sums {
		if want := piece*uint64(first(seed, i)) + piece*(piece-1)/2; got != want {
			return fmt.Errorf("the sum of the piece at %v is %d instead of %d", a.Ptr()+cuda.Ptr(4*i*piece), got, want)
		}
	}
	return nil
}

// resident returns how much host memory the process has, 0 if that is not known.
func resident() int {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	pages, err := strconv.Atoi(strings.Fields(string(text))[1])
	if err != nil {
		return 0
	}
	return pages * os.Getpagesize()
}
