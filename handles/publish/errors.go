package publish

import (
	"errors"
)

// What can become of a publication; test for them with errors.Is. The error itself is
// a [peer.Error], or a [cuda.Error] for what the driver refused. What can go wrong on a
// connection are the sentinels of package peer, and with memory those of package
// handles.
var (
	// ErrUnknown: nothing is published under that name.
	ErrUnknown = errors.New("not published")
	// ErrWithdrawn: the publisher withdrew what is followed. What is mapped stays until
	// the follower is closed.
	ErrWithdrawn = errors.New("withdrawn")
	// ErrUnfinished: the publisher ended before the work was done that a generation was
	// announced behind. Its elements are not shown any more, and what was computed from
	// them does not count.
	ErrUnfinished = errors.New("unfinished generation")
	// ErrStalled: a publisher that lives did not finish the work that a generation was
	// announced behind within FollowOptions.MaxWait.
	ErrStalled = errors.New("publisher stalled")
)
