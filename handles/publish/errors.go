package publish

import (
	"errors"
)

// Kinds of errors, for errors.Is. The error itself is a [peer.Error], or a [cuda.Error]
// for what the driver refused. Failures of connections are the sentinels of package
// peer, and of memory those of package handles.
var (
	// ErrUnknown: nothing is published under that name.
	ErrUnknown = errors.New("not published")
	// ErrWithdrawn: the publisher withdrew the publication. Its memory stays mapped until
	// the follower is closed.
	ErrWithdrawn = errors.New("withdrawn")
	// ErrUnfinished: the publisher, the connection or the follower ended before the work
	// behind an announcement was done, or while the publisher rewrote the elements.
	// The elements are no longer shown, and what was computed from them is invalid.
	ErrUnfinished = errors.New("unfinished generation")
	// ErrStalled: the publisher lives, and did not finish the work behind an announcement
	// within FollowOptions.MaxWait.
	ErrStalled = errors.New("publisher stalled")
	// ErrRewriting: the publisher rewrites the elements that are shown (Publication.Rewrite).
	ErrRewriting = errors.New("being rewritten")
	// ErrExcluded: the publisher rewrote without waiting for what the follower read
	// (RewriteOptions.ExcludeAfter), and goes on without it.
	ErrExcluded = errors.New("excluded")
	// ErrIncomplete: the publisher ended while it rewrote the elements, or before any generation of them was complete: they
	// may hold a mixture of generations.
	ErrIncomplete = errors.New("partly rewritten")
)
