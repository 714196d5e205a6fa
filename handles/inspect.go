package handles

import (
	"fmt"
	"time"

	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/share"
)

// inspected shows a lease to snapshots.
type inspected struct {
	l     *Lease
	until time.Time
}

// InspectLease implements share.Leased.
func (i inspected) InspectLease() share.Lease {
	i.l.mu.Lock()
	defer i.l.mu.Unlock()
	to := share.Lease{Bytes: i.l.bytes, Until: i.until}
	for p := range i.l.importers {
		to.Importers = append(to.Importers, int(p.PID))
	}
	return to
}

// Keeps implements suspend.Keeper.
func (i inspected) Keeps() (what string, memory []*phys.Handle) {
	i.l.mu.Lock()
	defer i.l.mu.Unlock()
	if i.l.ended {
		return "", nil
	}
	return fmt.Sprintf("the %v, made at %s (%s), which ends at %s if it is not closed: after that receivers may have it", i.l.name(),
		i.until.Add(-i.l.options.Timeout).Format(time.TimeOnly), i.l.progressLocked(), i.until.Format(time.TimeOnly)), i.l.handles
}
