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

// ErrStuck: the driver has not come back from a call in time. Nothing can end
// the call, so what it works on is left as it is.
var ErrStuck = errors.New("the driver does not come back from a call")

// TeamError is why there is no team, or why leaving one failed. It matches
// (errors.Is) what the ranks' own errors match of cuda's sentinels, ErrStuck and
// those of fabric/rendezvous, the same on every rank that was told.
type TeamError struct {
	// Step is what the ranks were at: "bind".
	Step string
	// Ranks are the reason.
	Ranks []int
	// Reason says what they said.
	Reason string

	causes []error
}

// Error says everything that is known, on one line.
func (e *TeamError) Error() string {
	return fmt.Sprintf("multicast: team step %q: %s", e.Step, e.Reason)
}

// Unwrap gives the sentinels, and this rank's own error.
func (e *TeamError) Unwrap() []error { return e.causes }

// sentinels are those that ranks tell each other, by their name on the wire.
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

// kindsOf are the names of the sentinels that an error matches.
func kindsOf(err error) (kinds []string) {
	for name, s := range sentinels {
		if errors.Is(err, s) {
			kinds = append(kinds, name)
		}
	}
	slices.Sort(kinds)
	return kinds
}

// failed is what the reports of a step come to for one rank, of which own is its
// own error.
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

// broken is a step that the group could not do. own is what this rank had to
// say there.
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

// disagree is what all ranks find out alike.
func disagree(step string, kind error, ranks []int, format string, args ...any) *TeamError {
	return &TeamError{Step: step, Ranks: ranks, Reason: fmt.Sprintf(format, args...), causes: []error{kind}}
}

// notReady reports whether the error is the driver's 'system not ready', which
// alone is worth another try.
func notReady(err error) bool {
	var d *cuda.Error
	return errors.As(err, &d) && d.Code == cuda.Code(driver.SystemNotReady)
}

func stuckError(op string, c *call) error {
	return fmt.Errorf("%s: %w: %s has taken %v; its memory stays as it is, until the call comes back (then Close works) or the process ends",
		op, ErrStuck, c.what, time.Since(c.began).Round(time.Millisecond))
}

func closedTeam(op string) error { return errs.ClosedError(op, "team") }
