// Package ranges gives packages that manage memory of their own, such as the pool,
// access to the inside of a vmm.Reservation: they map and unmap runs of chunks in one
// go, without an object for each and without waiting for the GPU. Users never import it
// and no public signature needs it: vmm.Reservation embeds a [Holder], and [Of] looks
// inside.
package ranges

import (
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Range is the inner state of a vmm.Reservation. Its methods are safe for
// concurrent use; changes of one range run one after the other. The
// operation's name is the caller's, for errors.
type Range interface {
	// MapRun maps chunks one behind the other from an offset on and grants the
	// run in one call. It takes over one count of each handle. If it fails everything
	// is as it was, except for what Left reports, which has counts of its own, and the
	// caller keeps its counts. The access list is kept and never changed.
	MapRun(op string, off uint64, chunks []*phys.Handle, access []driver.AccessDesc) error
	// UnmapRun unmaps a run of whole chunks in one call, and gives up the counts
	// that MapRun took over. It does not wait: the caller knows that the GPU has
	// passed. After an error the run is out of use; Close, or UnmapRun of the
	// same run, tries again.
	UnmapRun(op string, off, size uint64) error
	// Left returns how much memory, in bytes, failures left in a part: a MapRun that
	// could not be undone, or an UnmapRun. Its addresses are out of use until it is
	// gone.
	Left(off, size uint64) uint64
}

// Holder is embedded, unexported, by vmm.Reservation. Its only method is
// unexported too, so other modules cannot reach the inner state.
type Holder struct{ r Range }

// Hold makes the holder.
func Hold(r Range) Holder { return Holder{r} }

func (h *Holder) inner() Range { return h.r }

// Of looks inside a vmm.Reservation.
func Of(r interface{ inner() Range }) Range { return r.inner() }

// Resolve turns vmm.Properties into the driver's form, with every default
// decided, and returns the granularity in bytes.
func Resolve[Properties any](op string, d *cuda.Device, p Properties) (driver.AllocationProp, uint64, error) {
	return hooks.resolve.(resolver[Properties])(op, d, p)
}

// Grants turns a []vmm.Access into the driver's form, for memory that lies at a
// location, and refuses what could never work.
func Grants[Access any](op string, d *cuda.Device, memory driver.Location, access []Access) ([]driver.AccessDesc, error) {
	return hooks.grants.(granter[Access])(op, d, memory, access)
}

// Memory returns the memory of a *vmm.Mapping, with a count that the caller
// releases, and keeps the mapping open until drop.
func Memory[Mapping any](op string, m Mapping) (h *phys.Handle, drop func(), err error) {
	return hooks.memory.(memoryOf[Mapping])(op, m)
}

type (
	resolver[Properties any] = func(op string, d *cuda.Device, p Properties) (driver.AllocationProp, uint64, error)
	granter[Access any]      = func(op string, d *cuda.Device, memory driver.Location, access []Access) ([]driver.AccessDesc, error)
	memoryOf[Mapping any]    = func(op string, m Mapping) (h *phys.Handle, drop func(), err error)
)

// hooks have the types of vmm, which stands above this package.
var hooks struct{ resolve, grants, memory any }

// SetHooks sets how the package does this with the types of vmm, which calls it once.
func SetHooks[Properties, Access, Mapping any](resolve resolver[Properties], grants granter[Access], memory memoryOf[Mapping]) {
	hooks.resolve, hooks.grants, hooks.memory = resolve, grants, memory
}
