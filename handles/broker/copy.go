package broker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// copyTimeout bounds a copy, the start of its process and the making of a context included.
const copyTimeout = time.Minute

// copied fills memory with what an object has, by a process of Options.Copy: a copy needs a context, which a
// broker does not have.
func (b *Broker) copied(op string, from handles.Descriptor, of []*peer.FD, to handles.Descriptor, fds []*peer.FD) (err error) {
	c, theirs, err := peer.Pair(peer.Options{})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(b.ctx, copyTimeout)
	defer cancel()
	var p *exec.Cmd
	core.Hook(b.o.Log, "broker.Options.Copy", func() { p = b.o.Copy() })
	if p == nil {
		p = &exec.Cmd{Err: errors.New("Options.Copy returned no command")}
	}
	p.ExtraFiles = append([]*os.File{theirs}, p.ExtraFiles...)
	err = p.Start()
	_ = theirs.Close() // else the end of the process would go unnoticed
	if err == nil {
		defer context.AfterFunc(ctx, func() { _ = p.Process.Kill() })() // it may not end after its reply, either
		err = c.Send(ctx, peer.Message{Kind: wire.BrokerHello, Body: from.Device[:]})
		if err == nil {
			err = handles.SendFDs(ctx, c, from, of)
		}
		if err == nil {
			err = handles.SendFDs(ctx, c, to, fds)
		}
		if err == nil {
			_, err = c.Receive(ctx)
		}
		if err != nil {
			_ = p.Process.Kill()
		}
		_ = c.Close()
		// Its end says more than that of the connection.
		if ended := p.Wait(); ended != nil && (err == nil || errors.Is(err, peer.ErrGone)) {
			err = fmt.Errorf("the process that copies ended: %w", ended)
		}
	} else {
		_ = c.Close()
	}
	if err != nil {
		return errs.PeerCause(err, op, nil, "the copy of what was written", "see what the broker's process printed, and commit again")
	}
	return nil
}

// RunCopy is what a process of Options.Copy does: it copies the memory that a broker sends over the connection that
// the process has inherited, as descriptor 3.
func RunCopy(ctx context.Context, sys *cuda.System, c *peer.Conn) (err error) {
	const op = "broker.RunCopy"
	if sys == nil || c == nil {
		return errs.PeerInvalid(op, "a nil System or connection", "open one, and use peer.Inherit")
	}
	m, err := c.Receive(ctx)
	if err != nil {
		return err
	}
	var id cuda.UUID
	if m.Kind != wire.BrokerHello || len(m.Body) != len(id) {
		return errs.Violation("a message of kind %#x, where a device belongs", m.Kind)
	}
	copy(id[:], m.Body)
	d, err := deviceOf(op, sys, id)
	if err != nil {
		return err
	}
	from, err := handles.ReceiveBuffer(ctx, c, d, handles.ImportOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	defer func() { err = errs.Both(err, from.Close()) }()
	to, err := handles.ReceiveBuffer(ctx, c, d, handles.ImportOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errs.Both(err, to.Close()) }()
	if from.Len() != to.Len() {
		return errs.PeerInvalid(op, fmt.Sprintf("a copy of %s into %s", errs.Bytes(from.Len()), errs.Bytes(to.Len())), "leave it to a broker")
	}
	s, err := d.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errs.Both(err, s.Close()) }()
	if err := s.Copy(to.Ptr(), from.Ptr(), from.Len()); err != nil {
		return err
	}
	if err := s.Synchronize(); err != nil {
		return err
	}
	return c.Send(ctx, peer.Message{Kind: wire.BrokerDone})
}

// copyFor adds the object that is served in place of one whose memory its writer has.
func (b *books) copyFor(op string, o *object, q Quota) (*object, error) {
	r := o.record
	r.CopyOf = o.key
	var key keeper.Key
	_, _ = rand.Read(key[:]) // never fails
	to, err := b.add(op, key, r, o.memory.Chunks, q)
	if err == nil {
		clear(to.holders)
		to.sealing = true // it is the broker's until then
	}
	return to, err
}

// endCopied ends what a copy is served in place of: a broker that ended between the two left it. Its writer would
// commit it once more if the copy had gone meanwhile.
func (b *books) endCopied() (gone []*object) {
	for _, o := range b.objects {
		if of := b.objects[o.CopyOf]; o.State == sealed && of != nil && of.State == writing {
			gone = append(gone, b.end(of)...)
		}
	}
	return gone
}

// copyOf returns the sealed object that is served in place of one, or nil.
func (b *books) copyOf(key keeper.Key, h holder) *object {
	for _, o := range b.objects {
		if o.CopyOf == key && o.CopyOf != counter && o.Writer == h && o.State == sealed {
			return o
		}
	}
	return nil
}
