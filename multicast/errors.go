package multicast

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// ErrStuck is returned after a driver call has not returned in time. The call cannot be
// canceled, so the objects that it works on are kept.
var ErrStuck = errors.New("a driver call does not return")

// TeamError is the error of forming or leaving a team. It matches (errors.Is) the sentinels
// of cuda, of fabric/rendezvous and of this package that the ranks' own errors match, the
// same on every rank that learned of the failure.
type TeamError struct {
	// Step is the step that failed: "bind".
	Step string
	// Ranks are the ranks that failed.
	Ranks []int
	// Reason has their errors.
	Reason string

	causes []error
}

// Error returns everything that is known, on one line.
func (e *TeamError) Error() string {
	return fmt.Sprintf("multicast: team step %q: %s", e.Step, e.Reason)
}

// Unwrap returns the sentinels, and this rank's own error.
func (e *TeamError) Unwrap() []error { return e.causes }

// sentinels are those that ranks send each other, by their name on the wire.
var sentinels = map[string]error{
	"aborted":        ErrAborted,
	"address space":  cuda.ErrOutOfAddressSpace,
	"budget":         cuda.ErrBudget,
	"capacity":       cuda.ErrCapacity,
	"capturing":      cuda.ErrCapturing,
	"closed":         cuda.ErrClosed,
	"disagree":       rendezvous.ErrDisagree,
	"foreign object": cuda.ErrForeign,
	"in use":         cuda.ErrInUse,
	"invalid":        cuda.ErrInvalidArgument,
	"lost":           cuda.ErrDeviceLost,
	"memory":         cuda.ErrOutOfMemory,
	"no driver":      cuda.ErrNoDriver,
	"not permitted":  cuda.ErrNotPermitted,
	"not supported":  cuda.ErrNotSupported,
	"out of range":   cuda.ErrOutOfRange,
	"protocol":       peer.ErrProtocol,
	"stuck":          ErrStuck,
}

// kindsOf returns the names of the sentinels that an error matches.
func kindsOf(err error) (kinds []string) {
	for name, s := range sentinels {
		if errors.Is(err, s) {
			kinds = append(kinds, name)
		}
	}
	slices.Sort(kinds)
	return kinds
}

// failed returns the error of a step for one rank, from all reports and its own error.
func failed(step string, reports []report, own error) *TeamError {
	e := &TeamError{Step: step, causes: []error{rendezvous.ErrFailed}}
	if own != nil {
		e.causes = append(e.causes, own)
	}
	var said []string
	for rank, r := range reports {
		if r.Error == "" {
			continue
		}
		e.Ranks = append(e.Ranks, rank)
		said = append(said, fmt.Sprintf("rank %d: %s", rank, r.Error))
		for _, k := range r.Kinds {
			if s := sentinels[k]; s != nil && !slices.Contains(e.causes, s) {
				e.causes = append(e.causes, s)
			}
		}
	}
	e.Reason = strings.Join(said, "; ")
	return e
}

// broken returns the error of a step in which the group itself failed. own is this rank's
// error in that step.
func broken(step string, err, own error) *TeamError {
	e := &TeamError{Step: step, Reason: err.Error(), causes: []error{err}}
	var why *rendezvous.Error
	if errors.As(err, &why) {
		e.Ranks = why.Ranks
	}
	if own != nil {
		e.Reason += "; this rank: " + own.Error()
		e.causes = append(e.causes, own)
	}
	return e
}

// disagree returns an error that all ranks derive alike.
func disagree(step string, kind error, ranks []int, format string, args ...any) *TeamError {
	return &TeamError{Step: step, Ranks: ranks, Reason: fmt.Sprintf(format, args...), causes: []error{kind}}
}

// notReady reports whether the error is the driver's 'system not ready', the only one
// after which a step is tried again.
func notReady(err error) bool {
	var d *cuda.Error
	return errors.As(err, &d) && d.Code == cuda.Code(driver.SystemNotReady)
}

func stuckError(op string, c *pendingCall) error {
	return fmt.Errorf("%s: %w: %s has taken %v; its memory is kept until the call returns (then Close works) or the process ends",
		op, ErrStuck, c.what, time.Since(c.began).Round(time.Millisecond))
}

func closedTeam(op string) error { return errs.ClosedError(op, "team") }
