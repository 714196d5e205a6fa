package publish

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/sock"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// A follower watches the process that it followed. Another process may have taken the
// publication over while the follower slept, and may write the memory even after it gave
// the socket back. So whoever takes over records itself in a file beside the socket, under
// the lock of their folder, and waits for the process that is recorded there. By induction
// that one waited for all before it. docs/protocol.md has the file's form.

// place is a socket's absolute path, and its open folder. Each use has a descriptor of its
// own, since a lock belongs to that.
type place struct {
	path   string
	folder *sock.Dir
}

// place opens the folder that the client's socket was in when it connected.
func (k *Client) place(op string) (place, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.folder == nil {
		return place{}, errs.PeerClosed(op, "follower's client")
	}
	dir := filepath.Dir(k.path)
	now, err := sock.OpenDir(dir, 0)
	if err != nil {
		return place{}, errs.SystemCall(op, fmt.Sprintf("directory %q", dir), err)
	}
	if !now.Same(k.folder) {
		_ = now.Close()
		return place{}, errs.Peer(op, peer.ErrPeer, fmt.Sprintf("directory %q is another one than the publisher's", dir), "leave the publisher's in its place: its processes agree there on who publishes")
	}
	return place{k.path, now}, nil
}

// claim is a record: the process that took a publication over last, and how many have.
type claim struct {
	publication identity
	epoch       uint64
	by          sock.ProcessID
}

const (
	claimsMagic   = "cuvO"
	claimsVersion = 1
	claimBytes    = 16 + 8 + 4 + 8 + 8
	// maxClaims is more than the publications of a server.
	maxClaims = 2 * maxPublications
)

func encodeClaims(all []claim) []byte {
	var e wire.Encoder
	e.Raw([]byte(claimsMagic))
	e.Uint16(claimsVersion)
	e.Uint32(uint32(len(all)))
	for _, c := range all {
		e.Raw(c.publication[:])
		e.Uint64(c.epoch)
		e.Uint32(c.by.PID)
		e.Uint64(c.by.Namespace)
		e.Uint64(c.by.Start)
	}
	return e.B
}

func decodeClaims(b []byte) ([]claim, error) {
	if len(b) == 0 {
		return nil, nil // there is no file
	}
	d := wire.Decoder{B: b}
	if string(d.Raw(len(claimsMagic))) != claimsMagic || d.Uint16() != claimsVersion {
		d.Fail("it does not begin with %q and version %d", claimsMagic, claimsVersion)
	}
	all := make([]claim, d.Count(claimBytes, maxClaims))
	for i := range all {
		copy(all[i].publication[:], d.Raw(len(identity{})))
		all[i].epoch = d.Uint64()
		all[i].by = sock.ProcessID{PID: d.Uint32(), Namespace: d.Uint64(), Start: d.Uint64()}
	}
	return all, d.End()
}

// file returns the name of the file of a socket's claims.
func (p place) file() string { return filepath.Base(p.path) + ".owners" }

// locked runs f with the folder's lock and what the file has, and writes what f returns
// unless that is nil.
func (p place) locked(ctx context.Context, op string, f func(all []claim) ([]claim, error)) error {
	for {
		ok, err := p.folder.TryLock()
		if err != nil {
			return errs.SystemCall(op, p.path, err)
		}
		if ok {
			break
		}
		if !wait.Sleep(ctx, time.Millisecond) {
			return errs.PeerWait(ctx, op, fmt.Sprintf("another process has the lock of the folder of %q", p.path), "end the process of this user that hangs there")
		}
	}
	defer p.folder.Unlock()
	file := filepath.Join(filepath.Dir(p.path), p.file())
	b, err := p.folder.ReadFile(p.file(), len(claimsMagic)+6+maxClaims*claimBytes+1)
	if err != nil {
		return errs.SystemCall(op, file, err)
	}
	all, err := decodeClaims(b)
	if err != nil {
		return errs.PeerCause(err, op, peer.ErrProtocol, fmt.Sprintf("file %q", file), "remove it once every process has ended that published at the socket")
	}
	if all, err = f(all); err != nil || all == nil {
		return err
	}
	if err := p.folder.WriteFile(p.file(), encodeClaims(all)); err != nil {
		return errs.SystemCall(op, file, err)
	}
	return nil
}

// owner returns the process that took a publication over last, or nil if it has ended or is
// this one.
func owner(op string, all []claim, id identity) (*sock.Process, error) {
	self, err := sock.Self()
	if err != nil {
		return nil, errs.SystemCall(op, "this process", err)
	}
	i := slices.IndexFunc(all, func(c claim) bool { return c.publication == id })
	switch {
	case i < 0 || all[i].by == self:
		return nil, nil
	case all[i].by.Namespace != self.Namespace:
		return nil, errs.Peer(op, cuda.ErrNotSupported, fmt.Sprintf("the end of process %d of another pid namespace, which took publication %x over", all[i].by.PID, id), "run both in one pid namespace")
	}
	p, err := all[i].by.Open()
	if err != nil {
		return nil, errs.SystemCall(op, fmt.Sprintf("process %d, which took publication %x over", all[i].by.PID, id), err)
	}
	return p, nil
}

// awaitOwner waits until the process that took a publication over last has ended.
func (p place) awaitOwner(ctx context.Context, op string, id identity) error {
	var process *sock.Process
	err := p.locked(ctx, op, func(all []claim) (_ []claim, err error) {
		process, err = owner(op, all, id)
		return nil, err
	})
	if err != nil || process == nil {
		return err
	}
	defer func() { _ = process.Close() }()
	return awaitEnd(ctx, op, process, "another process took the publication over and has not ended, although it no longer serves the socket")
}

// take records this process as the one that takes a publication over. taken is false if
// another process that lives did so first. undo removes the record again.
func (p place) take(ctx context.Context, op string, id identity) (taken bool, undo func(), err error) {
	var before []claim
	err = p.locked(ctx, op, func(all []claim) ([]claim, error) {
		process, err := owner(op, all, id)
		if err != nil || process != nil {
			if process != nil {
				_ = process.Close()
			}
			return nil, err
		}
		self, err := sock.Self()
		if err != nil {
			return nil, errs.SystemCall(op, "this process", err)
		}
		taken = true
		mine := claim{publication: id, epoch: 1, by: self}
		var kept []claim
		for _, c := range all {
			switch {
			case c.publication == id:
				mine.epoch, before = c.epoch+1, []claim{c}
			case len(all) < maxClaims || lives(c.by):
				kept = append(kept, c)
			}
		}
		if len(kept) >= maxClaims {
			return nil, errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d publications of one socket that were taken over", len(kept)+1), "end some of the processes that took them over")
		}
		return append(kept, mine), nil
	})
	if err != nil || !taken {
		return false, nil, err
	}
	return true, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoWait)
		defer cancel()
		_ = p.locked(ctx, op, func(all []claim) ([]claim, error) {
			kept := slices.DeleteFunc(all, func(c claim) bool { return c.publication == id })
			return append(append([]claim{}, kept...), before...), nil
		})
	}, nil
}

// undoWait bounds how long an undo waits for the folder's lock.
const undoWait = time.Second

// lives reports whether a process may live.
func lives(id sock.ProcessID) bool {
	self, err := sock.Self()
	if err != nil || id.Namespace != self.Namespace {
		return true
	}
	p, err := id.Open()
	if p != nil {
		_ = p.Close()
	}
	return p != nil || err != nil
}

// awaitEnd waits for the end of a process.
func awaitEnd(ctx context.Context, op string, p *sock.Process, what string) error {
	if err := p.Wait(ctx); err != nil {
		if ctx.Err() != nil {
			return errs.PeerWait(ctx, op, what, "end it, or wait longer")
		}
		return errs.SystemCall(op, "the publisher's process", err)
	}
	return nil
}
