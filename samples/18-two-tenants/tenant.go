package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"time"

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

// tenant is another process, as the first one sees it: a tenant, or the reader of one.
type tenant struct {
	role   string
	number int
	cmd    *exec.Cmd
	conn   *peer.Conn
	host   int // memory that it has, when it replied last
}

func start(ctx context.Context, e *app.Env, o options, role string, number int) (*tenant, error) {
	conn, far, err := peer.Pair(peer.Options{})
	if err != nil {
		return nil, err
	}
	cmd, err := e.Again(ctx, role, "-folder", o.folder, "-mib", strconv.Itoa(o.mib), "-number", strconv.Itoa(number), "-reader="+strconv.FormatBool(o.reader))
	if err != nil {
		return nil, errors.Join(err, conn.Close(), far.Close())
	}
	cmd.ExtraFiles = []*os.File{far}
	if err := errors.Join(cmd.Start(), far.Close()); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &tenant{role: role, number: number, cmd: cmd, conn: conn}, nil
}

// ask has the tenant do something, and waits until that is done.
func (t *tenant) ask(ctx context.Context, what uint16) (r reply, err error) {
	if err := t.conn.Send(ctx, peer.Message{Kind: what}); err != nil {
		return r, err
	}
	m, err := t.conn.Receive(ctx)
	if err != nil {
		return r, fmt.Errorf("%s %d: %w", t.role, t.number, err)
	}
	if err := json.Unmarshal(m.Body, &r); err != nil {
		return r, err
	}
	t.host = r.Host
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
	contents
	e       *app.Env
	weights *vmm.Array[uint32] // which stay the same
	cache   *vmm.Array[uint32] // which each turn writes anew
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
	defer app.Close(&r.contents, &err)
	if err := r.open(e); err != nil {
		return err
	}
	if err := errors.Join(r.write(r.weights, r.seed), r.write(r.cache, r.seed+1), r.check(r.weights, r.seed)); err != nil {
		return err
	}
	if o.reader && o.number == 0 {
		shown, err := show(e, o.folder, r.weights)
		if err != nil {
			return err
		}
		defer app.Close(shown, &err)
	}
	return serve(e.Context, conn, r.do)
}

// do does what the first process asks for.
func (r *renter) do(ctx context.Context, what uint16) (err error) {
	switch what {
	case wake:
		return r.wake(ctx)
	case work:
		return r.work()
	}
	// All work that is under way is waited for, then the bytes go to the host. A reader of the weights
	// unmaps them first.
	r.asleep, err = vmm.Suspend(ctx, vmm.SuspendOptions{}, vmm.Tagged(r.e.System, "tenant")...)
	return err
}

// serve does what the first process asks for, until that closes the connection.
func serve(ctx context.Context, conn *peer.Conn, do func(ctx context.Context, what uint16) error) error {
	for {
		m, err := conn.Receive(ctx)
		if errors.Is(err, peer.ErrGone) {
			return nil
		}
		if err != nil {
			return err
		}
		began := time.Now()
		if err := do(ctx, m.Kind); err != nil {
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
