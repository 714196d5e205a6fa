package inspect

import (
	"log/slog"
	"strconv"
)

// LogValue implements slog.LogValuer. It logs the totals, the pools and the publications
// and no single objects. Attributes have the names of package metrics, without the prefix:
//
//	slog.Info("out of memory", "memory", snapshot)
func (s Snapshot) LogValue() slog.Value {
	attrs := []slog.Attr{
		slog.Int("pid", s.Process.PID),
		slog.Int("allocated_bytes", s.Totals.AllocatedBytes),
		slog.Int("mapped_bytes", s.Totals.MappedBytes),
		slog.Int("reserved_address_bytes", s.Totals.ReservedBytes),
		slog.Int("pending_closes", s.Totals.Pending),
		slog.Int("lost_objects_total", s.Totals.Lost),
	}
	for i, p := range s.Pools {
		attrs = append(attrs, slog.Any("pool"+strconv.Itoa(i), p))
	}
	for _, p := range s.Publications {
		attrs = append(attrs, slog.Group("publication", slog.String("name", p.Name), slog.Int("publication_bytes", p.Bytes),
			slog.Int("publication_pinned_bytes", p.Pinned), slog.Int("publication_followers", len(p.Followers))))
	}
	return slog.GroupValue(attrs...)
}

// LogValue implements slog.LogValuer.
func (p Pool) LogValue() slog.Value {
	return slog.GroupValue(slog.Int("gpu", p.Device), slog.Int("pool_reserved_bytes", p.Reserved), slog.Int("pool_requested_bytes", p.Requested),
		slog.Int("pool_blocks", p.Blocks), slog.Int("pool_waiting_blocks", p.Waiting), slog.Int("pool_limit_bytes", p.Limit))
}

// LogValue implements slog.LogValuer.
func (u Use) LogValue() slog.Value {
	return slog.GroupValue(slog.String("tag", u.Name), slog.Int("bytes", u.Bytes), slog.Int("count", u.Count))
}
