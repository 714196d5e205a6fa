package handles

import (
	"time"

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
