package broker

import (
	"encoding/json"
	"errors"
	"maps"

	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/sock"
)

// presence is what a broker knows of a client's process.
type presence struct {
	of       peer.Credentials
	sessions map[*session]struct{}
	// process is watched: its end will be noticed. Without it the end of the last session counts.
	process *sock.Process
	// remembered: the keeper has the process, too.
	remembered bool
	// lingers: it holds something without a session, and counts as one.
	lingers bool
}

// arrive notes a session of a client, and watches its process.
func (b *Broker) arrive(s *session, c *sock.Conn) *presence {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.present[s.h]
	if p == nil {
		p = &presence{of: s.of.Credentials, sessions: map[*session]struct{}{}}
		b.present[s.h] = p
	}
	p.sessions[s] = struct{}{}
	if p.lingers {
		p.lingers = false
		b.leaveLocked(p.of.UID) // its session counts
	}
	if p.process != nil || c == nil {
		return p
	}
	process, err := c.Process()
	if err != nil {
		return p // of another namespace, on a kernel before 6.5
	}
	p.process = process
	b.running.Go(func() { b.watch(s.h, p) })
	return p
}

// watch waits for the end of a client's process.
func (b *Broker) watch(h holder, p *presence) {
	err := p.process.Wait(b.ctx)
	if err != nil && b.ctx.Err() != nil {
		return
	}
	b.depart(h, p, func() {
		_ = p.process.Close()
		p.process = nil
	})
}

// depart notes that a session or the process of a client has ended, and ends what the client held if its process
// is gone.
func (b *Broker) depart(h holder, p *presence, note func()) {
	left, forget := false, false
	b.change(func() []*object {
		note()
		if b.present[h] != p || len(p.sessions) > 0 {
			return nil
		}
		if p.process != nil && b.books.holds(h) {
			if !p.lingers {
				p.lingers = true
				b.enterLocked(p.of.UID)
			}
			return nil
		}
		if p.process != nil {
			_ = p.process.Close() // which ends the watch
		}
		if p.lingers {
			b.leaveLocked(p.of.UID)
		}
		delete(b.present, h)
		left, forget = true, p.remembered
		return b.books.leave(h)
	})
	if left {
		b.unpublish(h, counter)
	}
	if forget {
		b.forget(h)
	}
}

// forget has the keeper forget a client, unless it is here again and remembered anew.
func (b *Broker) forget(h holder) {
	b.remembering.Lock()
	defer b.remembering.Unlock()
	b.mu.Lock()
	p := b.present[h]
	again := p != nil && p.remembered
	b.mu.Unlock()
	if again || b.ctx.Err() != nil {
		return
	}
	if err := b.keeper.Drop(b.ctx, keeper.Key(h)); err != nil {
		b.fail(err)
	}
}

// remembered is what the keeper has of a client that writes, as JSON, beside a descriptor of its process. So the
// next broker need not wait for a client that has ended, and a broker that dies again and again does not leave
// behind what such clients were writing.
type remembered struct {
	Client peer.Credentials `json:"client"`
}

// remember has the keeper keep the process of a client that is connected.
func (b *Broker) remember(s *session) error {
	if b.keeper == nil {
		return nil
	}
	b.remembering.Lock()
	defer b.remembering.Unlock()
	b.mu.Lock()
	p := b.present[s.h]
	if p.remembered || p.process == nil {
		b.mu.Unlock()
		return nil
	}
	if b.books.objects[keeper.Key(s.h)] != nil {
		b.mu.Unlock()
		return errs.Violation("a client with the number of an object")
	}
	f, err := p.process.FD()
	p.remembered = err == nil
	b.mu.Unlock()
	if err != nil {
		return errs.SystemCall(opServe, "a descriptor of the client's process", err)
	}
	file, err := peer.NewFD(f)
	if err == nil {
		err = b.keep(keeper.Key(s.h), remembered{p.of}, file)
		_ = file.Close()
	}
	if err != nil {
		b.mu.Lock()
		p.remembered = false
		b.mu.Unlock()
	}
	return err
}

// isClient reports whether an entry of the keeper is a client's, and not an object's.
func isClient(e *keeper.Entry) bool {
	var is struct{ Client json.RawMessage }
	return e.Key != counter && json.Unmarshal(e.Record, &is) == nil && is.Client != nil
}

// expect notes a client of an earlier broker.
func (b *Broker) expect(e *keeper.Entry) error {
	var r remembered
	if err := json.Unmarshal(e.Record, &r); err != nil {
		return err
	}
	if len(e.Files) == 0 { // more are of the same process, which came again before it was forgotten
		return errors.New("a client without a process")
	}
	p := &presence{of: r.Client, sessions: map[*session]struct{}{}, remembered: true}
	err := e.Files[0].Use(func(n int) (err error) {
		p.process, err = sock.ProcessOf(n)
		return err
	})
	if err != nil {
		return err
	}
	b.present[holder(e.Key)] = p
	return e.Close()
}

// settle ends what no client of an earlier broker came back for, and forgets those that closed while there was none.
func (b *Broker) settle() {
	b.change(b.books.settle)
	b.mu.Lock()
	all := maps.Clone(b.present)
	b.mu.Unlock()
	for h, p := range all {
		b.depart(h, p, func() {})
	}
}

// watchExpected watches the processes of the clients of an earlier broker.
func (b *Broker) watchExpected() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for h, p := range b.present {
		b.running.Go(func() { b.watch(h, p) })
	}
}
