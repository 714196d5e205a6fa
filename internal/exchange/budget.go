package exchange

import (
	"context"
	"fmt"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/lock"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// Share is the part of the limit of open files that descriptors of
// exported memory may take: 1/Share.
const Share = 4

// budget bounds the open descriptors of exported memory, which count against the same
// limit as this process's files and sockets.
type budget struct {
	mu   lock.Mutex[lock.Leaf]
	used int
	// kept is the part of used that imported memory keeps.
	kept  int
	freed chan struct{} // closed and replaced when some are given back
}

var Exports = budget{freed: make(chan struct{})}

// Limit returns how many descriptors may be open, and this process's limit of open files.
func (b *budget) Limit(op string) (most int, limit uint64, err error) {
	limit, err = fd.Limit()
	if err != nil {
		return 0, 0, errs.SystemCall(op, "the limit of open files", err)
	}
	return int(max(1, min(limit/Share, 1<<20))), limit, nil
}

// try takes n if so many are left.
func (b *budget) try(op string, n int) (bool, error) {
	most, _, err := b.Limit(op)
	if err != nil {
		return false, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if most-b.used < n {
		return false, nil
	}
	b.used += n
	return true, nil
}

// keep takes one for the lifetime of imported memory. It does not wait. Kept ones leave
// enough for a full message, so that sharing always goes on.
func (b *budget) keep(op string) error {
	most, limit, err := b.Limit(op)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if room := max(0, most-wire.MaxBatch); b.kept >= room || b.used >= most {
		return errs.Peer(op, peer.ErrOpenFiles, fmt.Sprintf("%d descriptors of imported memory are kept, of at most %d with this process's limit of %d open files, and %d are open of memory that is being shared",
			b.kept, room, limit, b.used-b.kept), "import memory in larger chunks or without KeepDescriptors, or raise the limit (ulimit -n)")
	}
	b.used++
	b.kept++
	return nil
}

// giveKept gives back one that keep took.
func (b *budget) giveKept() {
	b.mu.Lock()
	b.kept--
	b.mu.Unlock()
	b.Give(1)
}

// takeWithin is Take of at least one, which waits at most for a limit.
func (b *budget) takeWithin(ctx context.Context, op string, n int, limit time.Duration) (int, error) {
	if ok, err := b.try(op, n); ok || err != nil {
		return n, err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return b.Acquire(ctx, op, 1, n)
}

// Acquire takes from least to n, as many as are left, and waits for least until the context
// ends.
func (b *budget) Acquire(ctx context.Context, op string, least, n int) (int, error) {
	most, limit, err := b.Limit(op)
	if err != nil {
		return 0, err
	}
	for {
		b.mu.Lock()
		free, freed := most-b.used, b.freed
		if free >= least {
			n = min(n, free)
			b.used += n
			b.mu.Unlock()
			return n, nil
		}
		used := b.used
		b.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return 0, tooMany(context.Cause(ctx), op, fmt.Sprintf("%d descriptors of shared memory are open", used), most, limit)
		}
	}
}

// Ever returns an error if n can never be open at a time.
func (b *budget) Ever(op string, n int) error {
	most, limit, err := b.Limit(op)
	if err == nil && n > most {
		err = tooMany(nil, op, fmt.Sprintf("%d descriptors of shared memory at a time", n), most, limit)
	}
	return err
}

func tooMany(cause error, op, asked string, most int, limit uint64) error {
	return errs.PeerCause(cause, op, peer.ErrOpenFiles,
		fmt.Sprintf("%s, of at most %d, which is 1/%d of this process's limit of %d open files", asked, most, Share, limit),
		"share less at a time, or in larger chunks, or raise the limit (ulimit -n)")
}

// Give gives back n.
func (b *budget) Give(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
	close(b.freed)
	b.freed = make(chan struct{})
}

// Used returns how many are open.
func (b *budget) Used() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}
