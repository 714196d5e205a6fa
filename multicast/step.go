package multicast

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles/peer"
)

// After the driver's 'system not ready' all ranks together try a step again, up to
// notReadyTries times, after pauses that double.
const notReadyTries = 8

var notReadyPause = 10 * time.Millisecond

// report is what a rank sends the others about its part of a step.
type report struct {
	Error string   `json:",omitempty"`
	Kinds []string `json:",omitempty"`
	// NotReady requests another try.
	NotReady bool `json:",omitempty"`
	// Body is the content of the step.
	Body json.RawMessage `json:",omitempty"`
}

// reportOf returns the report of an error, which is empty without one.
func reportOf(err error) (r report) {
	if err != nil {
		r.Error, r.Kinds, r.NotReady = err.Error(), kindsOf(err), notReady(err)
	}
	return r
}

// offering is what a rank contributes to a step besides its report.
type offering struct {
	body any
	file *peer.FD // closed after the step
}

// outcome has the contributions of all ranks to a step that all completed. The files are
// the caller's.
type outcome struct {
	reports       []report
	contributions []rendezvous.Contribution
}

func (a *outcome) close() {
	for i := range a.contributions {
		a.contributions[i].Close()
	}
}

// step performs this rank's part, unless that is nil, and waits until all ranks have
// performed theirs. If one failed all ranks return an error; if some were not ready those
// try again, and the others wait with them.
//
// A part is repeated after it was not ready, so it must resume where it stopped.
func (t *Team) step(ctx context.Context, name string, do func() (offering, error)) (*outcome, error) {
	var mine offering
	var own error
	defer func() {
		if mine.file != nil {
			_ = mine.file.Close()
		}
	}()
	pause := notReadyPause
	for try := 1; ; try++ {
		if ctx.Err() != nil {
			own = fmt.Errorf("the caller's context ended: %w", context.Cause(ctx))
			t.group.Fail(own)
			return nil, broken(name, own, nil)
		}
		if try == 1 || own != nil {
			own = nil
			if do != nil {
				mine, own = do()
			}
		}
		a, err := t.exchange(ctx, name, try, mine, own)
		if err != nil {
			return nil, broken(name, err, own)
		}
		failures, waiting := 0, 0
		for _, r := range a.reports {
			switch {
			case r.Error != "" && !r.NotReady:
				failures++
			case r.NotReady:
				waiting++
			}
		}
		switch {
		case failures == 0 && waiting == 0:
			return a, nil
		case failures > 0 || try == notReadyTries:
			a.close()
			return nil, failed(name, a.reports, own)
		}
		a.close()
		time.Sleep(pause)
		pause *= 2
	}
}

// part returns this rank's part, bounded by the limit. The result of a late one is lost; the
// team owns what it made.
func (t *Team) part(name string, do func() (offering, error)) func() (offering, error) {
	return func() (offering, error) {
		var mine offering
		err := t.bounded("multicast.Team", "its part of the step \""+name+"\"", func() (err error) {
			mine, err = do()
			return err
		})
		if t.late != nil {
			return offering{}, err
		}
		return mine, err
	}
}

// exchange sends this rank's report to the others, and waits for theirs.
func (t *Team) exchange(ctx context.Context, name string, try int, mine offering, own error) (*outcome, error) {
	r := reportOf(own)
	if own == nil && mine.body != nil {
		b, err := json.Marshal(mine.body)
		if err != nil {
			return nil, err
		}
		r.Body = b
	}
	b, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	p := rendezvous.Contribution{Body: b}
	if own == nil && mine.file != nil {
		p.Files = []*peer.FD{mine.file}
	}
	full := "multicast: " + name
	if try > 1 {
		full += fmt.Sprintf(", try %d", try)
	}
	all, err := t.group.Exchange(ctx, full, p)
	if err != nil {
		return nil, err
	}
	a := &outcome{reports: make([]report, len(all)), contributions: all}
	for rank := range all {
		if err := json.Unmarshal(all[rank].Body, &a.reports[rank]); err != nil {
			a.close()
			err = fmt.Errorf("%w: rank %d sent an invalid message: %w", peer.ErrProtocol, rank, err)
			t.group.Fail(err)
			return nil, err
		}
	}
	return a, nil
}
