package drivertest

import (
	"fmt"
	"slices"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// A Case is one rule: a row of docs/driver-facts.md.
type Case struct {
	// Section is the section of the document.
	Section string
	// Name and Says are the row's words: the case, and what the driver returns.
	Name string
	Says string
	// Needs are what the machine must have; without one the case is skipped.
	Needs []Need
	// Run fails the test where the driver returns something else.
	Run func(t *T)
}

// Cases are all rules in the order of the document.
func Cases() []Case {
	return slices.Concat(
		section("1", creation, reservation, mapping, access, ends, remapping),
		section("2", contexts),
		section("3", running, captureEnds, edges, launching, hostFuncs, loading, waiting(), captureMatrix()),
		section("4", sharing),
		section("5", managedRules, managedRanges, discards),
		section("9", multicasts),
		section("10", checkpointed),
	)
}

func section(number string, groups ...[]Case) []Case {
	cases := slices.Concat(groups...)
	for i := range cases {
		cases[i].Section = number
	}
	return cases
}

// A Need is what a machine must have for a rule to apply. What the driver reports of itself
// and the machine's facts decide it, never a trial.
type Need struct {
	What string
	Met  func(s *suite) bool
}

func needs(n ...Need) []Need { return n }

var (
	softwareDriver = Need{"the software driver, since the real one would be harmed", func(s *suite) bool {
		return s.software
	}}
	twoDevices = Need{"two devices that reach each other's memory", func(s *suite) bool {
		if len(s.devices) < 2 {
			return false
		}
		there, r1 := s.D.DeviceCanAccessPeer(s.devices[0].Device, s.devices[1].Device)
		back, r2 := s.D.DeviceCanAccessPeer(s.devices[1].Device, s.devices[0].Device)
		return r1 == driver.Success && r2 == driver.Success && there && back
	}}
	fabricChannel   = Need{"an open IMEX channel", func(s *suite) bool { return s.env.Machine.IMEXChannel }}
	noFabricChannel = Need{"no open IMEX channel", func(s *suite) bool { return !s.env.Machine.IMEXChannel }}

	shareableByFD   = attribute("file descriptor handles", driver.AttrHandlePosixFD)
	fabricHandles   = attribute("fabric handles", driver.AttrHandleFabric)
	compressible    = attribute("generic compression", driver.AttrGenericCompression)
	rdmaMemory      = attribute("RDMA with VMM", driver.AttrRDMAWithVMM)
	hostMemory      = attribute("memory located on the host", driver.AttrHostVirtualMemory)
	hostNUMAMemory  = attribute("memory located on a host NUMA node", driver.AttrHostNUMAVirtualMemory)
	dmaBuf          = attribute("DMA-BUF", driver.AttrDMABuf)
	lessThanOneTiB  = Need{"a device of less than 1 TiB", func(s *suite) bool { return s.devices[0].total < 1<<40 }}
	cooperation     = attribute("cooperative launches", driver.AttrCooperativeLaunch)
	memoryPools     = attribute("memory pools", driver.AttrMemoryPools)
	streamMemoryOps = entryPoints(driver.CallStreamWriteValue64, driver.CallStreamWaitValue64)
)

// attribute is the need for a device attribute that reads other than zero on
// the first device.
func attribute(what string, a driver.DeviceAttribute) Need {
	return Need{fmt.Sprintf("%s (device attribute %d)", what, a), func(s *suite) bool { return s.attribute(a) }}
}

// entryPoints is the need for a driver that is new enough to have them all.
func entryPoints(calls ...driver.Call) Need {
	return Need{fmt.Sprintf("entry points %v", calls), func(s *suite) bool {
		return !slices.ContainsFunc(calls, func(c driver.Call) bool { return !s.D.Has(c) })
	}}
}
