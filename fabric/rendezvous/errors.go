package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Errors of a group; test for them with errors.Is. Furthermore, a rank
// that is gone or was expelled is peer.ErrGone; one that
// does not arrive in time is peer.ErrTimeout; use after Close is cuda.ErrClosed.
var (
	// ErrFailed: a rank gave up.
	ErrFailed = errors.New("a rank gave up")
	// ErrDisagree: the ranks are not at the same step, or do not agree.
	ErrDisagree = errors.New("the ranks disagree")
)

// Error is the error of a failed step, the same on all ranks of a group.
type Error struct {
	// Step is the failed step.
	Step Step
	// Ranks are the ranks at fault: they died, gave up or did not arrive.
	Ranks []int
	// Reason says what they did or did not do.
	Reason string
	// Hint is the remedy.
	Hint string

	kind error
	// cause is this rank's own error, for errors.Is alone.
	cause error
}

// Error returns all of it on one line.
func (e *Error) Error() string {
	step := fmt.Sprintf("rendezvous: step %d", e.Step.Number)
	if e.Step.Name != "" {
		step += fmt.Sprintf(" %q", e.Step.Name)
	}
	asked := e.Reason // includes the cause's text
	if len(e.Ranks) > 0 {
		asked = ranks(e.Ranks)
		if e.Reason != "" {
			asked += ": " + e.Reason
		}
	}
	return errs.Line(step, e.kind, asked, nil, e.Hint)
}

// Unwrap returns the sentinel and the cause.
func (e *Error) Unwrap() []error { return errs.Unwrap(e.kind, e.cause) }

func errNoGroup(name string) *Error {
	return &Error{Step: Step{Name: name}, kind: cuda.ErrInvalidArgument, Reason: "a nil group", Hint: "make one with InProcess, Host or Join"}
}

// ranks writes "rank 3" or "ranks 1, 4 and 60 more".
func ranks(all []int) string {
	const most = 8
	var b strings.Builder
	b.WriteString("rank")
	if len(all) > 1 {
		b.WriteString("s")
	}
	for i, r := range all {
		switch {
		case i == most && len(all) > most+1:
			fmt.Fprintf(&b, " and %d more", len(all)-most)
			return b.String()
		case i > 0:
			b.WriteString(",")
		}
		fmt.Fprintf(&b, " %d", r)
	}
	return b.String()
}

// late returns the error of a wait for ranks that did not arrive.
func late(ctx context.Context, s Step, missing []int, waited time.Duration) *Error {
	e := &Error{Step: s, Ranks: missing, kind: peer.ErrTimeout, cause: context.Cause(ctx),
		Reason: fmt.Sprintf("did not arrive within %v", waited.Round(time.Millisecond)),
		Hint:   "check whether they run, and what they wait for"}
	if !errors.Is(e.cause, context.DeadlineExceeded) {
		e.kind, e.Reason, e.Hint = e.cause, "not arrived when the caller's context ended", ""
		e.cause = nil
	}
	return e
}

// reasonOf returns the part of an error that the other ranks do not know.
func reasonOf(err error) string {
	var e *Error
	if errors.As(err, &e) {
		return e.Reason
	}
	return err.Error()
}

// causeOf returns the part of this rank's error that is not in the common outcome.
func causeOf(err error) error {
	var e *Error
	if !errors.As(err, &e) {
		return err
	}
	if e.cause != nil {
		return errors.Join(e.kind, e.cause)
	}
	return e.kind
}
