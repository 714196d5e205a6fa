package memspec

import (
	"fmt"
	"math"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// CheckLocation refuses locations that do not exist.
func CheckLocation(op string, s *cuda.System, l cuda.Location) error {
	switch l.Type {
	case cuda.LocationDevice:
		if _, err := s.Device(l.ID); err != nil {
			return errs.Invalid(op, fmt.Sprintf("%v of %d", l, len(s.Devices())), "devices are numbered from 0")
		}
		return nil
	case cuda.LocationHost:
		if l.ID != 0 {
			return errs.Invalid(op, fmt.Sprintf("%v with ID %d", l, l.ID), "the host has no ID: use cuda.OnHost, or cuda.OnHostNUMA for a node")
		}
		return nil
	case cuda.LocationHostNUMA:
		if l.ID < 0 || l.ID > math.MaxInt32 {
			return errs.Invalid(op, l.String(), "NUMA nodes are numbered from 0")
		}
		return nil
	case cuda.LocationHostNUMACurrent:
		return errs.Invalid(op, l.String(), "the driver refuses it for physical memory: name the node with cuda.OnHostNUMA")
	}
	return errs.Invalid(op, l.String(), "use cuda.OnDevice, OnHost or OnHostNUMA")
}
