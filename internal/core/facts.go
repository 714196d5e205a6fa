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

// Cached returns what was found under a key within that time, or else finds it. Two
// concurrent calls may both find it.
func (s *System) Cached(key any, within time.Duration, find func() any) any {
	s.facts.mu.RLock()
	r, ok := s.facts.recalled[key]
	s.facts.mu.RUnlock()
	if ok && time.Since(r.when) < within {
		return r.what
	}
	what := find()
	s.facts.mu.Lock()
	defer s.facts.mu.Unlock()
	if s.facts.recalled == nil {
		s.facts.recalled = map[any]recalled{}
	}
	s.facts.recalled[key] = recalled{what, time.Now()}
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
	s.facts.mu.RLock()
	d, ok := s.facts.decided[w]
	s.facts.mu.RUnlock()
	return d.prop, d.gran, ok
}

// Decide caches what a request comes to.
func (s *System) Decide(w PropertiesKey, prop driver.AllocationProp, gran uint64) {
	s.facts.mu.Lock()
	defer s.facts.mu.Unlock()
	if s.facts.decided == nil {
		s.facts.decided = map[PropertiesKey]decision{}
	}
	s.facts.decided[w] = decision{prop, gran}
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
	s.facts.mu.RLock()
	v, ok := s.facts.attributes[key]
	s.facts.mu.RUnlock()
	if ok {
		return v, driver.Success
	}
	v, r := s.Drv.DeviceGetAttribute(a, d)
	if r != driver.Success {
		s.Observe(r, d)
		return 0, r
	}
	s.facts.mu.Lock()
	defer s.facts.mu.Unlock()
	if s.facts.attributes == nil {
		s.facts.attributes = map[attributeKey]int32{}
	}
	s.facts.attributes[key] = v
	return v, driver.Success
}

// Granularity returns what sizes of memory with these properties must be multiples of,
// in bytes.
func (s *System) Granularity(prop driver.AllocationProp, o driver.GranularityOption) (uint64, driver.Result) {
	key := granularityKey{prop, o}
	s.facts.mu.RLock()
	v, ok := s.facts.granularities[key]
	s.facts.mu.RUnlock()
	if ok {
		return v, driver.Success
	}
	v, r := s.Drv.MemGetAllocationGranularity(prop, o)
	if r != driver.Success {
		return 0, s.Observe(r, DevicesOf(prop.Location)...)
	}
	s.facts.mu.Lock()
	defer s.facts.mu.Unlock()
	if s.facts.granularities == nil {
		s.facts.granularities = map[granularityKey]uint64{}
	}
	s.facts.granularities[key] = v
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
