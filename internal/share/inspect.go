package share

import (
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// Objects that share memory with other processes register for snapshots by
// core.System.Show, as one of the last three interfaces below. Their methods hold the
// locks of one publication, follower or lease briefly, and make no driver call.

// Managed is managed memory, which is in the list of live objects. Its method queries the driver.
type Managed interface{ InspectManaged() ManagedMemory }

// ManagedMemory is managed memory as a snapshot shows it.
type ManagedMemory struct {
	Base       driver.Ptr
	Bytes      uint64
	Device     driver.Device   // that it was made on
	Prefetched driver.Location // the last prefetch of all of it, if there was one
	Located    bool            // the driver knows where it is: Resident
	Resident   []Resident      // in order, without what no processor has touched
}

// Resident is a run of managed memory that is at one location, as far as the driver sampled it.
type Resident struct {
	Off, Bytes uint64
	At         driver.Location
}

// Published is a publication.
type Published interface{ InspectPublication() Publication }

// Publication is a publication as a snapshot shows it. Sizes are in bytes.
type Publication struct {
	Name          string
	Base          driver.Ptr // of the published buffer
	Generation    uint64
	Bytes, Pinned uint64 // published; no longer published but mapped by followers
	Suspended     bool   // nothing is shown until its memory is back
	Followers     []Reader
}

// Reader is a follower as its publisher sees it.
type Reader struct {
	PID, UID      int // 0 and -1 if the process is unknown
	Since         time.Time
	Generation    uint64
	Bytes, Pinned uint64
	Refused       string // its reason to refuse the last generation
}

// Following is a follower in this process.
type Following interface{ InspectFollower() Follower }

// Follower is a follower as a snapshot shows it.
type Follower struct {
	Name       string
	Base       driver.Ptr
	PID        int // of the publisher; 0 if unknown
	Generation uint64
	Bytes      uint64 // mapped
	Suspended  bool   // its publisher's memory is, so that it shows nothing
	Stuck      string // why it makes no progress, if so
}

// Leased is a lease.
type Leased interface{ InspectLease() Lease }

// Lease is a lease as a snapshot shows it.
type Lease struct {
	Bytes     uint64
	Until     time.Time
	Importers []int // pids of the processes that have imported
}
