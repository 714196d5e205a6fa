package inspect_test

import (
	"bytes"
	"log/slog"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/stretchr/testify/require"
)

func TestLogging(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == slog.LevelKey {
			return slog.Attr{}
		}
		return a
	}}))
	log.Info("full", "memory", inspect.Snapshot{
		Process:      inspect.Process{PID: 7},
		Totals:       cuda.Stats{AllocatedBytes: 5, MappedBytes: 6, ReservedBytes: 7, Pending: 1},
		Pools:        []inspect.Pool{{Device: 1, Reserved: 4, Requested: 3, Blocks: 2, Segments: make([]inspect.Segment, 3)}},
		Publications: []inspect.Publication{{Name: "w", Bytes: 2}},
	}, "most", inspect.Use{Name: "kv", Bytes: 9, Count: 1})
	require.Equal(t, "msg=full memory.pid=7 memory.allocated_bytes=5 memory.mapped_bytes=6 memory.reserved_address_bytes=7 memory.pending_closes=1 memory.lost_objects_total=0 "+
		"memory.pool0.gpu=1 memory.pool0.pool_reserved_bytes=4 memory.pool0.pool_requested_bytes=3 memory.pool0.pool_blocks=2 memory.pool0.pool_waiting_blocks=0 memory.pool0.pool_limit_bytes=0 "+
		"memory.publication.name=w memory.publication.publication_bytes=2 memory.publication.publication_pinned_bytes=0 memory.publication.publication_followers=0 "+
		"most.tag=kv most.bytes=9 most.count=1\n", out.String())
}
