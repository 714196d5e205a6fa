package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/vmm"
)

// ShareOptions configure Share.
type ShareOptions struct {
	// Import bounds the memory that this rank imports of each other rank.
	Import handles.ImportOptions
	// Log receives a record of a lease that ends too early, or whose memory the driver
	// does not release; nil logs nothing.
	Log *slog.Logger
}

// Share maps every rank's memory on every other rank, by the handle type that
// the group agreed on ([Agree]), in two steps: the handles travel, and then
// no rank goes on before all have imported. It returns the other ranks' buffers by
// rank, mapped for the device, which the caller closes. The element of this rank is nil,
// and that of a rank without memory (mine is nil) too.
//
// A rank shares its buffer's bytes in use as of the call. A lease retains them until the
// others have imported. If any rank fails, all do: Share closes the buffers that it
// mapped, and the error names the rank and the step. Share returns buffers or an error,
// never both. Memory that this rank has closed meanwhile, and that the driver does not
// release with the lease, is no error of the group: it is logged, and System.Drain
// retries it.
func Share(ctx context.Context, g *Group, a Agreement, d *cuda.Device, mine *vmm.Buffer, o ShareOptions) (all []*vmm.Buffer, err error) {
	const handlesStep, importedStep = "share handles", "import memory"
	if g == nil {
		return nil, errNoGroup(handlesStep)
	}
	var l *handles.Lease
	var p Contribution
	if mine != nil {
		l, err = handles.LeaseBuffer(mine, handles.LeaseOptions{Handle: a.Handle, Timeout: 2*g.timeout + farewell, Log: o.Log})
		if err != nil {
			g.Fail(err)
			return nil, err
		}
		// All ranks share one outcome, which this rank's driver cannot change any more.
		defer func() {
			if left := l.Close(); err != nil {
				err = errors.Join(err, left)
			}
		}()
		if p.Body, err = l.Offer().MarshalText(); err != nil {
			g.Fail(err)
			return nil, err
		}
		p.Files = l.Offer().Files
	}
	contributions, err := g.Exchange(ctx, handlesStep, p)
	if err != nil {
		return nil, err
	}
	defer func() {
		for r := range contributions {
			contributions[r].Close()
		}
	}()
	all = make([]*vmm.Buffer, g.Size())
	for r, p := range contributions {
		if r == g.Rank() || len(p.Body) == 0 {
			continue
		}
		if all[r], err = importFrom(p, a, d, o.Import); err != nil {
			return nil, abandonAll(all, g.failAt(importedStep, fmt.Errorf("memory of rank %d: %w", r, err)))
		}
	}
	if err := g.Barrier(ctx, importedStep); err != nil {
		return nil, abandonAll(all, err)
	}
	return all, nil
}

// importFrom maps what a rank contributed.
func importFrom(p Contribution, a Agreement, d *cuda.Device, o handles.ImportOptions) (*vmm.Buffer, error) {
	var offer handles.Offer
	if err := offer.UnmarshalText(p.Body); err != nil {
		return nil, err
	}
	if offer.Descriptor.Handle != a.Handle {
		return nil, fmt.Errorf("%w: memory by %v, where %v was agreed on", peer.ErrProtocol, offer.Descriptor.Handle, a.Handle)
	}
	offer.Files = p.Files
	return handles.ImportBuffer(d, offer, o)
}

// abandonAll releases the buffers made so far, after a step that failed with err.
func abandonAll(all []*vmm.Buffer, err error) error {
	for _, b := range all {
		if b != nil {
			err = share.Of(b).Abandon("rendezvous.Share", err)
		}
	}
	return err
}
