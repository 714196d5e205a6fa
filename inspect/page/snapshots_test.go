package page_test

import (
	"math/rand"
	"strconv"
	"time"

	"github.com/cuvmm/cuvmm/inspect"
)

// many returns a snapshot with so many blocks in a pool, a buffer and an alias.
func many(blocks int) inspect.Snapshot {
	const mib = 1 << 20
	s := snapshot()
	s.Driver, s.Time, s.Totals.Reservations = "CUDA 13.0", time.Unix(1_700_000_000, 0), 3
	s.Stacks = []inspect.Stack{{"github.com/cuvmm/cuvmm/vmm.NewBuffer (/src/vmm/buffer.go:9)", "main.load (load.go:10)", "main.main (main.go:5)"}, {"main.cache (cache.go:7)"}}
	r := rand.New(rand.NewSource(1))
	region := inspect.Reservation{Ptr: 0x7f0000000000, Bytes: 1 << 40, Granularity: 2 * mib}
	at := 0
	var segment inspect.Segment
	for i := range blocks {
		size := 512 << r.Intn(12)
		if i%7 != 0 {
			segment.Blocks = append(segment.Blocks, inspect.Block{Offset: at, Bytes: size, Requested: size - 3, Waiting: i%50 == 1,
				Tag: []string{"weights", "kv cache", ""}[i%3], Stack: 1 + i%2})
		}
		at += size
	}
	segment.Ptr, segment.Bytes, segment.Kind = region.Ptr, (at+32*mib-1)/(32*mib)*(32*mib), "region"
	for o := 0; o < segment.Bytes; o += 32 * mib {
		id := uint64(len(s.Memory) + 1)
		s.Memory = append(s.Memory, inspect.Memory{ID: id, Bytes: 32 * mib, Location: "device 0", Mappings: 1})
		region.Mappings = append(region.Mappings, inspect.Mapping{Offset: o, Bytes: 32 * mib, Memory: id, Access: "device 0: read-write"})
	}
	requested := 0
	for _, b := range segment.Blocks {
		requested += b.Requested
	}
	s.Pools = []inspect.Pool{{Reserved: segment.Bytes, Requested: requested, Blocks: len(segment.Blocks), Segments: []inspect.Segment{segment}}}
	buffer := inspect.Reservation{Ptr: 0x7e0000000000, Bytes: 1 << 37}
	for i := range 9 {
		id := uint64(1_000_000 + i)
		s.Memory = append(s.Memory, inspect.Memory{ID: id, Bytes: 16 * mib, Location: "device 0", Mappings: 1 + i%2, Exported: i < 3})
		buffer.Mappings = append(buffer.Mappings, inspect.Mapping{Offset: i * 16 * mib, Bytes: 16 * mib, Memory: id})
	}
	alias := inspect.Reservation{Ptr: 0x7d0000000000, Bytes: 64 * mib, Mappings: []inspect.Mapping{{Offset: 32 * mib, Bytes: 16 * mib, Memory: 1_000_001}}}
	s.Buffers = []inspect.Buffer{{Ptr: buffer.Ptr, Used: 100 * mib, Committed: 128 * mib, Reserved: buffer.Bytes}}
	s.Publications = []inspect.Publication{{Name: "embeddings", Ptr: buffer.Ptr, Bytes: 48 * mib, Followers: []inspect.Reader{{PID: 4711, Pinned: 16 * mib}}}}
	s.Reservations = []inspect.Reservation{alias, buffer, region}
	return s
}

// regions returns a snapshot of so many ranges of all sizes: buffers, some of them published
// or imported, ranges of a pool, and ranges that the program maps itself, or not at all.
func regions(n int) inspect.Snapshot {
	s := snapshot()
	s.Driver, s.Time, s.Totals.Reservations = "CUDA 13.0", time.Unix(1_700_000_000, 0), n
	s.Devices = []inspect.Device{{Ordinal: 0, Name: "Software GPU", Memory: 80 << 30}, {Ordinal: 1, Name: "Software GPU", Memory: 80 << 30}}
	r := rand.New(rand.NewSource(int64(n)))
	at := inspect.Address(0x7f0000000000)
	var q inspect.Pool
	for i := range n {
		region := inspect.Reservation{Ptr: at, Bytes: 2 * mib << r.Intn(14)}
		mapped := 0
		for range []int{1, 0, 2, 40}[i%4] {
			bytes := min(2*mib<<r.Intn(6), region.Bytes-mapped)
			if bytes <= 0 {
				break
			}
			id := uint64(len(s.Memory) + 1)
			s.Memory = append(s.Memory, inspect.Memory{ID: id, Bytes: bytes, Location: "device " + strconv.Itoa(i%2), Mappings: 1 + i%3/2, Exported: i%12 == 4, Imported: i%12 == 8})
			region.Mappings = append(region.Mappings, inspect.Mapping{Offset: mapped, Bytes: bytes, Memory: id})
			s.Totals.MappedBytes += bytes
			s.Totals.AllocatedBytes += bytes
			if mapped += bytes; i%4 == 3 {
				mapped += 4 * mib // which stays unmapped
			}
		}
		s.Totals.Mappings += len(region.Mappings)
		switch {
		case i%12 == 6:
			segment := inspect.Segment{Ptr: at, Bytes: mapped, Kind: "region", Blocks: []inspect.Block{{Bytes: mapped / 2, Requested: mapped / 2, Tag: "cache"}}}
			q.Segments = append(q.Segments, segment)
			q.Blocks, q.Requested, q.Reserved = q.Blocks+1, q.Requested+mapped/2, q.Reserved+mapped
		case i%4 < 3:
			s.Buffers = append(s.Buffers, inspect.Buffer{Ptr: at, Used: mapped * 3 / 4, Committed: mapped, Reserved: region.Bytes, Device: i % 2, Imported: i%12 == 8})
		}
		if i%12 == 4 {
			s.Publications = append(s.Publications, inspect.Publication{Name: "shard " + strconv.Itoa(i), Ptr: at, Bytes: mapped, Followers: []inspect.Reader{{PID: 7}}})
		}
		s.Reservations = append(s.Reservations, region)
		at += inspect.Address(region.Bytes) + 1<<30
	}
	if q.Blocks > 0 {
		s.Pools = []inspect.Pool{q}
	}
	return s
}

// managedMemory is managed memory of which the driver knows where it is, and some of which not.
func managedMemory() []inspect.Managed {
	return []inspect.Managed{
		{Ptr: 0x7e0000000000, Bytes: 16 * mib, Prefetched: "device 0", Located: true, Resident: []inspect.Resident{{Bytes: 4 * mib, Location: "device 0"},
			{Offset: 4 * mib, Bytes: 8 * mib, Location: "host"}, {Offset: 14 * mib, Bytes: mib, Location: "device 1"}}},
		{Ptr: 0x7e0100000000, Bytes: 8 * mib, Device: 1, Prefetched: "device 1"},
	}
}
