package core

import (
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// facts caches what a driver says of its devices, which never changes while it runs, so
// that hot paths need not ask again.
type facts struct {
	mu            lock.RWMutex[lock.Leaf]
	attributes    map[attributeKey]int32
	granularities map[granularityKey]uint64
	decided       map[PropertiesKey]decision
	recalled      map[any]recalled
}

type recalled struct {
	what any
	when time.Time
}

// recall reads one of the maps, and keep adds to it.
func recall[K comparable, V any](s *System, from *map[K]V, key K) (V, bool) {
	s.facts.mu.RLock()
	defer s.facts.mu.RUnlock()
	v, ok := (*from)[key]
	return v, ok
}

func keep[K comparable, V any](s *System, in *map[K]V, key K, v V) {
	s.facts.mu.Lock()
	defer s.facts.mu.Unlock()
	if *in == nil {
		*in = map[K]V{}
	}
	(*in)[key] = v
}

// Cached returns what was found under a key within that time, or else finds it. Two
// concurrent calls may both find it.
func (s *System) Cached(key any, within time.Duration, find func() any) any {
	if r, ok := recall(s, &s.facts.recalled, key); ok && time.Since(r.when) < within {
		return r.what
	}
	what := find()
	keep(s, &s.facts.recalled, key, recalled{what, time.Now()})
	return what
}

// PropertiesKey is what was requested of memory, before defaults are decided: a
// vmm.Properties on a device, as a key.
type PropertiesKey struct {
	Device       int
	LocationType int32
	LocationID   int
	Handles      uint32
	Compressible bool
	RDMA         uint8
	Usage        uint16
	Granularity  uint8
}

type decision struct {
	prop driver.AllocationProp
	gran uint64
}

// Decided returns what was decided for the same request before.
func (s *System) Decided(w PropertiesKey) (prop driver.AllocationProp, gran uint64, ok bool) {
	d, ok := recall(s, &s.facts.decided, w)
	return d.prop, d.gran, ok
}

// Decide caches what a request comes to.
func (s *System) Decide(w PropertiesKey, prop driver.AllocationProp, gran uint64) {
	keep(s, &s.facts.decided, w, decision{prop, gran})
}

type attributeKey struct {
	device    driver.Device
	attribute driver.DeviceAttribute
}

type granularityKey struct {
	prop   driver.AllocationProp
	option driver.GranularityOption
}

// Attribute returns a device attribute, or 0 if the driver returns an error.
func (s *System) Attribute(d driver.Device, a driver.DeviceAttribute) int32 {
	v, _ := s.ReadAttribute(d, a)
	return v
}

// ReadAttribute returns a device attribute and the driver's result. After an error the
// value is 0, and the next call reads it again.
func (s *System) ReadAttribute(d driver.Device, a driver.DeviceAttribute) (int32, driver.Result) {
	key := attributeKey{d, a}
	if v, ok := recall(s, &s.facts.attributes, key); ok {
		return v, driver.Success
	}
	v, r := s.Drv.DeviceGetAttribute(a, d)
	if r != driver.Success {
		s.Observe(r, d)
		return 0, r
	}
	keep(s, &s.facts.attributes, key, v)
	return v, driver.Success
}

// Granularity returns what sizes of memory with these properties must be multiples of,
// in bytes.
func (s *System) Granularity(prop driver.AllocationProp, o driver.GranularityOption) (uint64, driver.Result) {
	key := granularityKey{prop, o}
	if v, ok := recall(s, &s.facts.granularities, key); ok {
		return v, driver.Success
	}
	v, r := s.Drv.MemGetAllocationGranularity(prop, o)
	if r != driver.Success {
		return 0, s.Observe(r, DevicesOf(prop.Location)...)
	}
	keep(s, &s.facts.granularities, key, v)
	return v, driver.Success
}

// UUID returns what identifies a device to other processes. It is zero if the driver
// returns an error.
func (s *System) UUID(d driver.Device) driver.UUID {
	u, r := s.Drv.DeviceGetUUID(d)
	if r != driver.Success {
		s.Observe(r, d)
	}
	return u
}
