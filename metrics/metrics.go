// Package metrics provides a Prometheus collector of a System's memory.
//
//	prometheus.MustRegister(metrics.New(sys))
//
// Sizes are in bytes and times in seconds. The labels of devices are those of the
// DCGM exporter (UUID, and gpu for the ordinal), so that both join:
//
//	cuvmm_pool_reserved_bytes / on(UUID) group_left (DCGM_FI_DEV_FB_TOTAL * 1024 * 1024)
//
// A scrape reads counts that exist anyway, so its time does not depend on how much memory
// there is. Each series has the System's number in the process as its label system, so that
// one registry can have several Systems. No label identifies an allocation or a stream: see package inspect for
// single allocations. README.md describes each
// metric, and dashboard.json is a dashboard for Grafana.
package metrics

import (
	"fmt"
	"runtime/debug"
	"strconv"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/prometheus/client_golang/prometheus"
)

// New returns a collector of the System's metrics. It is safe for concurrent use. It may
// outlive the System, and then exports what is left of it. A scrape makes one driver call
// for each device that the System uses.
func New(sys *cuda.System) prometheus.Collector {
	serial := int64(0)
	if s := core.SystemOf(sys); s != nil {
		serial = s.Serial
	}
	return prometheus.WrapCollectorWith(prometheus.Labels{"system": strconv.FormatInt(serial, 10)}, collector{sys})
}

type collector struct{ sys *cuda.System }

// metric is a metric and its labels.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

// all has the metrics by name.
var all = map[string]metric{}

func gauge(name, help string, labels ...string) metric {
	return define(prometheus.GaugeValue, name, help, labels)
}

func counter(name, help string, labels ...string) metric {
	return define(prometheus.CounterValue, name, help, labels)
}

func define(kind prometheus.ValueType, name, help string, labels []string) metric {
	m := metric{prometheus.NewDesc(name, help, labels, nil), kind}
	all[name] = m
	return m
}

var (
	deviceMemory = gauge("cuvmm_device_memory_bytes", "Memory of the device.", "gpu", "UUID")
	deviceFree   = gauge("cuvmm_device_free_bytes", "Memory of the device that no process has.", "gpu", "UUID")

	addressSpace = gauge("cuvmm_reserved_address_bytes", "Address space that is reserved, which is not memory.")
	allocated    = gauge("cuvmm_allocated_bytes", "Physical memory that this process has, imported memory included.")
	mapped       = gauge("cuvmm_mapped_bytes", "Memory that is mapped; a memory that is mapped twice counts twice.")
	managed      = gauge("cuvmm_managed_bytes", "Managed memory.")
	pinnedHost   = gauge("cuvmm_host_bytes", "Pinned host memory that the program holds.")
	graphHost    = gauge("cuvmm_graph_host_bytes", "Pinned host memory that graphs hold.")
	objects      = gauge("cuvmm_objects", "Objects that are open, by kind.", "kind")
	pending      = gauge("cuvmm_pending_closes", "Closed objects that wait for the GPU.")
	leftovers    = gauge("cuvmm_leftovers", "Parts of objects that the driver did not take back, which the library tries again.")
	leftoverMem  = gauge("cuvmm_leftover_bytes", "Memory of those parts.")
	lost         = counter("cuvmm_lost_objects_total", "Objects that were collected without Close, whose memory leaked.")
	released     = counter("cuvmm_shared_released_bytes_total", "Memory that was shared and then released here: other processes may still hold it.")

	suspended = gauge("cuvmm_suspended_bytes", "Memory that is suspended: it was given back to the driver for now.")
	kept      = gauge("cuvmm_suspended_kept_bytes", "Host memory that keeps the contents of suspended memory.")
	idleHost  = gauge("cuvmm_host_idle_bytes", "Pinned host memory that is retained for the next use.")

	budgetCommitted = gauge("cuvmm_budget_committed_bytes", "Physical memory that the owners of the budget have.", "budget", "name")
	budgetPeak      = gauge("cuvmm_budget_peak_bytes", "The most that it ever was.", "budget", "name")
	budgetLimit     = gauge("cuvmm_budget_limit_bytes", "The budget's limit; absent if there is none.", "budget", "name")

	poolInfo      = gauge("cuvmm_pool_info", "1, with the name and the tag that the program gave the pool.", "gpu", "UUID", "pool", "name", "tag")
	poolReserved  = gauge("cuvmm_pool_reserved_bytes", "Physical memory that the pool has.", "gpu", "UUID", "pool")
	poolSuspended = gauge("cuvmm_pool_suspended_bytes", "Memory of the pool that was suspended, and takes none now.", "gpu", "UUID", "pool")
	poolPeak      = gauge("cuvmm_pool_peak_reserved_bytes", "The most physical memory that the pool ever had.", "gpu", "UUID", "pool")
	poolRequested = gauge("cuvmm_pool_requested_bytes", "Live blocks as they were requested.", "gpu", "UUID", "pool")
	poolLimit     = gauge("cuvmm_pool_limit_bytes", "The most physical memory that the pool may have; absent if there is no limit.", "gpu", "UUID", "pool")
	poolBlocks    = gauge("cuvmm_pool_blocks", "Live blocks.", "gpu", "UUID", "pool")
	poolWaiting   = gauge("cuvmm_pool_waiting_blocks", "Blocks that were freed and wait for other streams or a capture.", "gpu", "UUID", "pool")
	poolArenas    = gauge("cuvmm_pool_arenas", "Arenas that captures and their graphs keep.", "gpu", "UUID", "pool")
	poolAllocs    = counter("cuvmm_pool_allocations_total", "Allocations that succeeded, with pool.Options.Statistics.", "gpu", "UUID", "pool")
	poolFrees     = counter("cuvmm_pool_frees_total", "Frees, with pool.Options.Statistics.", "gpu", "UUID", "pool")
	poolBytes     = counter("cuvmm_pool_allocated_bytes_total", "Bytes that were requested in all, with pool.Options.Statistics.", "gpu", "UUID", "pool")
	poolTag       = gauge("cuvmm_pool_tag_requested_bytes", "Live blocks of a tag as they were requested, with pool.Options.Statistics.", "gpu", "UUID", "pool", "tag")

	published       = gauge("cuvmm_publication_bytes", "Memory that is published.", "name")
	publishedPinned = gauge("cuvmm_publication_pinned_bytes", "Memory that is no longer published, but that followers still map, summed over them.", "name")
	followers       = gauge("cuvmm_publication_followers", "Followers of the publication.", "name")
	refusals        = gauge("cuvmm_publication_refusing_followers", "Followers that did not take the last generation.", "name")
	publishedAsleep = gauge("cuvmm_publication_suspended", "1 if the publication's memory is suspended; of several with one name, if that of any is.", "name")
	generation      = gauge("cuvmm_publication_generation", "Changes of the publication; of several with one name, of the one that is ahead.", "name")

	followed      = gauge("cuvmm_follower_bytes", "Memory that a follower of this process has mapped.", "name")
	followedGen   = gauge("cuvmm_follower_generation", "The last generation that the follower has.", "name")
	followedStuck = gauge("cuvmm_follower_stuck", "1 if the follower makes no progress.", "name")
	followedSleep = gauge("cuvmm_follower_suspended", "1 if the publisher's memory is suspended, so that the follower shows nothing.", "name")
	leases        = gauge("cuvmm_leases", "Open leases.")
	leasedBytes   = gauge("cuvmm_leased_bytes", "Memory that open leases hold.")
	up            = gauge("cuvmm_up", "1 if the System could be read.")
	build         = gauge("cuvmm_build_info", "1, with the library's version, and the driver's: its kind and the CUDA version that it implements.", "version", "driver", "cuda")
)

// Describe implements prometheus.Collector.
func (c collector) Describe(to chan<- *prometheus.Desc) {
	for _, m := range all {
		to <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(to chan<- prometheus.Metric) {
	put := func(m metric, value int, labels ...string) {
		to <- prometheus.MustNewConstMetric(m.desc, m.kind, float64(value), labels...)
	}
	s, err := inspect.Summarize(c.sys)
	if err != nil {
		put(up, 0)
		return
	}
	put(up, 1)
	put(build, 1, buildLabels(c.sys.Driver())...)
	uuids := map[int]string{}
	for _, d := range s.Devices {
		gpu := strconv.Itoa(d.Ordinal)
		uuids[d.Ordinal] = d.UUID
		put(deviceMemory, d.Memory, gpu, d.UUID)
		if d.Free != nil {
			put(deviceFree, *d.Free, gpu, d.UUID)
		}
	}
	totals(s.Totals, put)
	for _, p := range s.Pools {
		pools(p, put, strconv.Itoa(p.Device), uuids[p.Device], strconv.Itoa(p.Serial))
	}
	for _, b := range s.Budgets {
		budgets(b, put, strconv.Itoa(b.Serial), b.Name)
	}
	shared(s, put)
}

// buildLabels are the labels of cuvmm_build_info.
func buildLabels(d cuda.DriverInfo) []string {
	version, kind := "(unknown)", "real"
	if b, ok := debug.ReadBuildInfo(); ok {
		for _, m := range append(b.Deps, &b.Main) {
			if m.Path == "github.com/cuvmm/cuvmm" {
				version = m.Version
			}
		}
	}
	if d.Software {
		kind = "software"
	}
	return []string{version, kind, fmt.Sprintf("%d.%d", d.Version/1000, d.Version%1000/10)}
}

func totals(t cuda.Stats, put func(m metric, value int, labels ...string)) {
	put(addressSpace, t.ReservedBytes)
	put(allocated, t.AllocatedBytes)
	put(mapped, t.MappedBytes)
	put(managed, t.ManagedBytes)
	put(pinnedHost, t.HostBytes)
	put(graphHost, t.GraphBytes)
	put(idleHost, t.IdleHostBytes)
	put(suspended, t.SuspendedBytes)
	put(kept, t.KeptBytes)
	put(pending, t.Pending)
	put(leftovers, t.Leftovers)
	put(leftoverMem, t.LeftoverBytes)
	put(lost, t.Lost)
	put(released, t.SharedReleasedBytes)
	for _, o := range []struct {
		kind string
		n    int
	}{{"reservation", t.Reservations}, {"allocation", t.Allocations}, {"mapping", t.Mappings}, {"stream", t.Streams}, {"event", t.Events},
		{"graph", t.Graphs}, {"module", t.Modules}, {"host buffer", t.HostBuffers}, {"managed memory", t.Managed}} {
		put(objects, o.n, o.kind)
	}
}

func pools(p inspect.Pool, put func(m metric, value int, labels ...string), labels ...string) {
	put(poolInfo, 1, append(labels[:len(labels):len(labels)], p.Name, p.Tag)...)
	put(poolReserved, p.Reserved-p.Suspended, labels...)
	put(poolSuspended, p.Suspended, labels...)
	put(poolPeak, p.Peak, labels...)
	put(poolRequested, p.Requested, labels...)
	put(poolBlocks, p.Blocks, labels...)
	put(poolWaiting, p.Waiting, labels...)
	put(poolArenas, p.Arenas, labels...)
	if p.Limit > 0 {
		put(poolLimit, p.Limit, labels...)
	}
	if !p.Counted {
		return
	}
	put(poolAllocs, p.Allocs, labels...)
	put(poolFrees, p.Frees, labels...)
	put(poolBytes, p.AllocatedBytes, labels...)
	for _, tag := range p.Tags {
		put(poolTag, tag.Bytes, append(labels[:len(labels):len(labels)], tag.Name)...)
	}
}

func budgets(b inspect.Budget, put func(m metric, value int, labels ...string), labels ...string) {
	put(budgetCommitted, b.Committed, labels...)
	put(budgetPeak, b.Peak, labels...)
	if b.Limit > 0 {
		put(budgetLimit, b.Limit, labels...)
	}
}

// flag is 1 for what is so.
func flag(yes bool) int {
	if yes {
		return 1
	}
	return 0
}

func shared(s inspect.Snapshot, put func(m metric, value int, labels ...string)) {
	type sum struct{ bytes, pinned, followers, refusing, suspended, generation int }
	sums := map[string]*sum{} // several servers may publish the same name
	for _, p := range s.Publications {
		t := sums[p.Name]
		if t == nil {
			t = new(sum)
			sums[p.Name] = t
		}
		t.bytes += p.Bytes
		t.pinned += p.Pinned
		t.followers += len(p.Followers)
		t.generation = max(t.generation, int(p.Generation))
		t.suspended = max(t.suspended, flag(p.Suspended))
		for _, f := range p.Followers {
			if f.Refused != "" {
				t.refusing++
			}
		}
	}
	for name, t := range sums {
		put(published, t.bytes, name)
		put(publishedPinned, t.pinned, name)
		put(followers, t.followers, name)
		put(refusals, t.refusing, name)
		put(publishedAsleep, t.suspended, name)
		put(generation, t.generation, name)
	}
	type state struct{ bytes, generation, stuck, suspended int }
	states := map[string]state{}
	for _, f := range s.Followers {
		t := states[f.Name]
		t.bytes += f.Bytes
		t.generation = max(t.generation, int(f.Generation))
		t.stuck = max(t.stuck, flag(f.Stuck != ""))
		t.suspended = max(t.suspended, flag(f.Suspended))
		states[f.Name] = t
	}
	for name, t := range states {
		put(followed, t.bytes, name)
		put(followedGen, t.generation, name)
		put(followedStuck, t.stuck, name)
		put(followedSleep, t.suspended, name)
	}
	bytes := 0
	for _, l := range s.Leases {
		bytes += l.Bytes
	}
	put(leases, len(s.Leases))
	put(leasedBytes, bytes)
}
