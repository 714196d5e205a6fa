package publish

import (
	"context"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/share"
)

// inspected shows a publication to snapshots.
type inspected struct{ p *Publication }

// inspect adds the publication to snapshots of the System, until Withdraw.
func (p *Publication) inspect() {
	context.AfterFunc(p.ctx, core.SystemOf(p.memory.About().Device).Show(inspected{p}))
}

// InspectPublication implements share.Published.
func (i inspected) InspectPublication() share.Publication {
	st := i.p.Stats()
	to := share.Publication{Name: st.Name, Base: i.p.memory.About().Base, Generation: st.Generation,
		Bytes: uint64(st.Bytes), Pinned: uint64(st.Pinned), Suspended: st.Suspended}
	for _, f := range st.Followers {
		r := share.Reader{UID: -1, Since: f.Since, Generation: f.Generation, Bytes: uint64(f.Bytes), Pinned: uint64(f.Pinned), Refused: f.Refused}
		if f.Known {
			r.PID, r.UID = f.Peer.PID, int(f.Peer.UID)
		}
		to.Followers = append(to.Followers, r)
	}
	return to
}

// inspectedFollower shows a follower to snapshots. The memory stays valid after Close.
type inspectedFollower struct {
	f      *follower
	base   driver.Ptr
	memory share.Memory
}

// inspect adds the follower to snapshots of the System, until it is closed.
func (f *follower) inspect() {
	context.AfterFunc(f.ctx, core.SystemOf(f.dev).Show(inspectedFollower{f, f.memory.About().Base, f.memory}))
}

// InspectFollower implements share.Following.
func (i inspectedFollower) InspectFollower() share.Follower {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	to := share.Follower{Name: i.f.name, Base: i.base, PID: int(i.f.about.Exporter.PID), Generation: i.f.sub.current().generation,
		Bytes: i.memory.Committed(), Suspended: i.f.sub.state() == Suspended}
	if err := i.f.sub.err(); err != nil {
		to.Stuck = err.Error()
	}
	return to
}
