package publish

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// CloseStale closes each follower of the client whose publisher is gone or has withdrawn,
// as Follower.CloseAfter does: behind the work that is on the streams now, without waiting
// for it. Such a follower keeps the memory that it has mapped, which the next publisher may
// need. CloseStale returns how many bytes they had mapped, all of which are free once the
// GPU has passed the work and no other process has the memory. It closes what this client
// follows: each process that followed the publisher calls it for itself. An allocation of
// the next publisher that finds too little memory says how much others hold.
//
// A follower that would come back (its State is Stale) is closed, too, and does not; one that
// TakeOver was called for is not closed. If a follower cannot be closed, CloseStale returns the
// error, closes the others, and may be called again.
func (k *Client) CloseStale(streams ...*cuda.Stream) (bytes int, err error) {
	const op = "publish.Client.CloseStale"
	switch {
	case k == nil:
		return 0, errs.PeerInvalid(op, "a nil client", "make one with Dial or NewClient")
	case len(streams) == 0:
		return 0, errs.PeerInvalid(op, "no streams", "name the streams whose work may use the memory")
	}
	k.mu.Lock()
	followers := slices.Collect(maps.Keys(k.followers))
	k.mu.Unlock()
	for _, f := range followers {
		n := f.pinned()
		if n == 0 || f.taking.Err() != nil {
			continue
		}
		if failed := f.closeAfter(streams); failed != nil {
			err = errors.Join(err, failed)
			continue
		}
		bytes += int(n)
	}
	return bytes, err
}

// addFollower notes a follower of the client, until that is closed.
func (k *Client) addFollower(f *follower) {
	f.client = k
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.followers == nil {
		k.followers = map[*follower]struct{}{}
	}
	k.followers[f] = struct{}{}
	context.AfterFunc(f.ctx, func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		delete(k.followers, f)
	})
}

// pinned returns how many bytes of a publisher that is gone the follower has mapped.
func (f *follower) pinned() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.sub.stale() {
		return 0
	}
	return f.memory.Committed()
}

// StaleMemory implements core.Stale.
func (i inspectedFollower) StaleMemory(on driver.Device) (what string, bytes uint64) {
	if core.DeviceOf(i.memory.About().Asked.Location) != on {
		return "", 0
	}
	return i.f.name, i.f.pinned()
}
