package inspect

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
)

// Format and Version are those of the snapshots that this package writes. Readers
// ignore fields that they do not know; a change that they cannot ignore has another
// Version.
const (
	Format  = "cuvmm snapshot"
	Version = 2
)

// Snapshot describes a process's GPU address space. Sizes and offsets are in bytes.
// In JSON addresses and handles are strings of hexadecimal digits ("0x7f0000000000"),
// since not every reader has integers of 64 bits. What is unknown is left out, as are
// empty lists and zero values that say nothing.
type Snapshot struct {
	Format  string `json:"format"`
	Version int    `json:"version"`
	// Time is when the walk began, and Took its duration.
	Time time.Time     `json:"time"`
	Took time.Duration `json:"took_ns"`

	Process Process  `json:"process"`
	Driver  string   `json:"driver"`
	Devices []Device `json:"devices"`
	// Totals are the System's counts.
	Totals cuda.Stats `json:"totals"`

	// Reservations are by address and do not overlap.
	Reservations []Reservation `json:"reservations,omitempty"`
	// Memory is physical memory in the order of its creation.
	Memory  []Memory `json:"memory,omitempty"`
	Buffers []Buffer `json:"buffers,omitempty"`
	// Sparse are ranges with holes, and Sources what they have their pages from.
	Sparse  []Sparse `json:"sparse,omitempty"`
	Sources []Source `json:"sources,omitempty"`
	Pools   []Pool   `json:"pools,omitempty"`
	// Managed is managed memory, by address.
	Managed []Managed `json:"managed,omitempty"`
	// Others are live objects of other kinds, such as streams.
	Others []Other `json:"others,omitempty"`

	// Budgets are those of the process, whichever System their memory is of.
	Budgets []Budget `json:"budgets,omitempty"`

	Publications []Publication `json:"publications,omitempty"`
	Followers    []Follower    `json:"followers,omitempty"`
	Leases       []Lease       `json:"leases,omitempty"`

	// Leftovers are what operations could not give back, the oldest first: see
	// cuda.System.Leftovers. A summary has their totals alone.
	Leftovers []Leftover `json:"leftovers,omitempty"`

	// Stacks are the stacks of creation. A Stack field is an index into them that counts
	// from 1; 0 is no stack.
	Stacks []Stack `json:"stacks,omitempty"`
}

// Process is the process that the snapshot was taken of.
type Process struct {
	PID  int    `json:"pid"`
	Name string `json:"name"`
	Host string `json:"host"`
}

// Device is a device of the System.
type Device struct {
	Ordinal int    `json:"ordinal"`
	Name    string `json:"name"`
	UUID    string `json:"uuid"`
	Memory  int    `json:"memory"`
	// Free is the memory that no process has. It is nil if the System has not used the
	// device so far: the driver's call would make a context on it.
	Free *int `json:"free,omitempty"`
}

// Address is a device address, or the raw handle of a stream.
type Address cuda.Ptr

// String writes the address in hexadecimal.
func (a Address) String() string { return cuda.Ptr(a).String() }

// MarshalText writes the address in hexadecimal.
func (a Address) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText reads a number in Go's notation.
func (a *Address) UnmarshalText(text []byte) error {
	n, err := strconv.ParseUint(string(text), 0, 64)
	if err != nil {
		return fmt.Errorf("an address is hexadecimal, as in 0x7f0000000000: %w", err)
	}
	*a = Address(n)
	return nil
}

// Reservation is a range of address space.
type Reservation struct {
	Ptr         Address `json:"ptr"`
	Bytes       int     `json:"bytes"`
	Granularity int     `json:"granularity"`
	// Mappings are in order of their offsets. Between them are holes.
	Mappings []Mapping `json:"mappings,omitempty"`
	// Stuck bytes could not be unmapped or released after a failure.
	Stuck int `json:"stuck,omitempty"`
	Stack int `json:"stack,omitempty"`
}

// Mapping is physical memory at an offset of a reservation.
type Mapping struct {
	Offset int `json:"offset"`
	Bytes  int `json:"bytes"`
	// Memory is the ID of the memory. Mappings of one memory are aliases.
	Memory uint64 `json:"memory"`
	// Access is the access that each location has: "device 0: read-write, device 1:
	// read-only".
	Access string `json:"access,omitempty"`
	// Closing mappings were closed and wait for the GPU.
	Closing bool `json:"closing,omitempty"`
	// Suspended mappings have no memory now: they get it back at this address.
	Suspended bool `json:"suspended,omitempty"`
}

// Memory is physical memory.
type Memory struct {
	ID    uint64 `json:"id"`
	Bytes int    `json:"bytes"`
	// Location is where the memory is: "device 0".
	Location string `json:"location"`
	// Mappings is the number of its mappings in this process.
	Mappings int `json:"mappings"`
	// Imported memory comes from another process. Exported memory was shared, so other
	// processes may hold it.
	Imported bool `json:"imported,omitempty"`
	Exported bool `json:"exported,omitempty"`
	// Suspended memory was given back to the driver for now, and takes none.
	Suspended bool `json:"suspended,omitempty"`
	Stack     int  `json:"stack,omitempty"`
}

// Buffer is a vmm.Buffer or vmm.Array. It begins where its reservation does.
type Buffer struct {
	Ptr Address `json:"ptr"`
	// Name and Tag are those that the program gave it.
	Name string `json:"name,omitempty"`
	Tag  string `json:"tag,omitempty"`
	// Used is the length, Committed the memory, and Reserved the address space of the
	// buffer, in bytes. Mappings behind the committed bytes were clipped and wait for the
	// GPU.
	Used      int  `json:"used"`
	Committed int  `json:"committed"`
	Reserved  int  `json:"reserved"`
	Device    int  `json:"device"`
	Imported  bool `json:"imported,omitempty"`
	Stack     int  `json:"stack,omitempty"`
}

// Sparse is a vmm.Sparse. Its reservation's mappings are more than its pages: freed pages lie
// under holes, and a null page may.
type Sparse struct {
	Ptr Address `json:"ptr"`
	// Name and Tag are those that the program gave it.
	Name string `json:"name,omitempty"`
	Tag  string `json:"tag,omitempty"`
	// Page is the size of a page. The range has addresses for Pages, of which Mapped are mapped,
	// and Shared of those elsewhere, too. Freed ones lie under holes, and Stuck ones could not be
	// unmapped.
	Page   int `json:"page"`
	Pages  int `json:"pages"`
	Mapped int `json:"mapped"`
	Shared int `json:"shared,omitempty"`
	Freed  int `json:"freed,omitempty"`
	Stuck  int `json:"stuck,omitempty"`
	Device int `json:"device"`
	// Spans are the mapped pages, in order. Between them are holes.
	Spans []Span `json:"spans,omitempty"`
	Stack int    `json:"stack,omitempty"`
}

// Span is N pages from page First on.
type Span struct {
	First int `json:"first"`
	N     int `json:"n"`
}

// Source is a vmm.Pages: of Pages of a size, ranges use Used, each once however many share it.
type Source struct {
	Name  string `json:"name,omitempty"`
	Tag   string `json:"tag,omitempty"`
	Page  int    `json:"page"`
	Pages int    `json:"pages"`
	Used  int    `json:"used"`
	// Waiting free pages have work behind them that the GPU had not passed.
	Waiting int `json:"waiting,omitempty"`
	Stack   int `json:"stack,omitempty"`
}

// Managed is a managed.Buffer or managed.Array.
type Managed struct {
	Ptr    Address `json:"ptr"`
	Bytes  int     `json:"bytes"`
	Device int     `json:"device"` // that it was made on
	// Prefetched is where all of it was prefetched last: "device 0". It need not be there: the
	// prefetch may not have run, and processors that touch pages move them.
	Prefetched string `json:"prefetched,omitempty"`
	// Located reports whether the driver knows where the pages are. Then Resident are runs of
	// them, in order, without those that no processor has touched. Drivers for CUDA 13.4 or
	// later sample it; so far only the software driver is asked (sim.Options.DriverVersion).
	Located  bool       `json:"located,omitempty"`
	Resident []Resident `json:"resident,omitempty"`
	Stack    int        `json:"stack,omitempty"`
}

// Resident is a run of managed memory at a location: "device 0", "host".
type Resident struct {
	Offset   int    `json:"offset"`
	Bytes    int    `json:"bytes"`
	Location string `json:"location"`
}

// Other is a live object of another kind: "host buffer", "stream", "multicast object".
type Other struct {
	Kind  string `json:"kind"`
	Bytes int    `json:"bytes,omitempty"`
	Stack int    `json:"stack,omitempty"`
}

// Pool is a pool with its blocks.
type Pool struct {
	// Serial numbers the pools of a process from 1; no number is reused.
	Serial int `json:"serial"`
	// Name and Tag are those that the program gave it.
	Name   string `json:"name,omitempty"`
	Tag    string `json:"tag,omitempty"`
	Device int    `json:"device"`
	// Reserved is the pool's physical memory, and Limit the most it may be; 0 is no limit.
	// Requested is the sum over Blocks live blocks, and Idle memory that is not mapped.
	Reserved  int `json:"reserved"`
	Requested int `json:"requested"`
	Blocks    int `json:"blocks"`
	Idle      int `json:"idle,omitempty"`
	Limit     int `json:"limit,omitempty"`
	// Suspended is the part of Reserved that has no memory now.
	Suspended int `json:"suspended,omitempty"`
	// Peak is the highest that Reserved ever was.
	Peak int `json:"peak"`
	// Waiting blocks were freed, and wait for other streams or a capture.
	Waiting int `json:"waiting,omitempty"`
	// Arenas is the number of arenas that captures and their graphs keep.
	Arenas int `json:"arenas,omitempty"`
	// Counted reports whether pool.Options.Statistics is on. Then Allocs, Frees and
	// AllocatedBytes count from the pool's beginning, and Tags sums up the live blocks by
	// tag.
	Counted        bool  `json:"counted,omitempty"`
	Allocs         int   `json:"allocs,omitempty"`
	Frees          int   `json:"frees,omitempty"`
	AllocatedBytes int   `json:"allocated_bytes,omitempty"`
	Tags           []Use `json:"tags,omitempty"`
	// Segments are the pool's mapped memory, in order of their addresses.
	Segments []Segment `json:"segments,omitempty"`
	Streams  []Stream  `json:"streams,omitempty"`
	// History has the recorded events, the oldest first.
	History []Event `json:"history,omitempty"`
}

// Segment is a run of chunks of a pool that belongs to one stream.
type Segment struct {
	Ptr   Address `json:"ptr"`
	Bytes int     `json:"bytes"`
	// Kind is "slab" if all blocks have one size, Slot, and "region" otherwise.
	Kind  string `json:"kind"`
	Chunk int    `json:"chunk"`
	Slot  int    `json:"slot,omitempty"`
	// Stream is the raw handle of the stream.
	Stream Address `json:"stream"`
	// Arena segments are kept for a capture or its graph.
	Arena bool `json:"arena,omitempty"`
	// Pinned chunks never move.
	Pinned int     `json:"pinned,omitempty"`
	Blocks []Block `json:"blocks,omitempty"`
}

// Block is a live or waiting block of a segment. Memory between blocks is free.
type Block struct {
	Offset int `json:"offset"`
	Bytes  int `json:"bytes"`
	// Requested is the size of the request.
	Requested int `json:"requested,omitempty"`
	// Waiting blocks were freed, and wait for other streams or a capture.
	Waiting bool   `json:"waiting,omitempty"`
	Tag     string `json:"tag,omitempty"`
	Stack   int    `json:"stack,omitempty"`
}

// Stream sums up a pool's blocks of a stream.
type Stream struct {
	Stream    Address `json:"stream"`
	Blocks    int     `json:"blocks"`
	Requested int     `json:"requested"`
	Waiting   int     `json:"waiting,omitempty"`
	Arena     bool    `json:"arena,omitempty"`
}

// Event is an allocation or a free of a pool.
type Event struct {
	// Op is "alloc" or "free".
	Op     string    `json:"op"`
	Time   time.Time `json:"time"`
	Ptr    Address   `json:"ptr"`
	Bytes  int       `json:"bytes"`
	Stream Address   `json:"stream"`
	Tag    string    `json:"tag,omitempty"`
	Stack  int       `json:"stack,omitempty"`
}

// Budget is a cuda.Budget.
type Budget struct {
	// Serial numbers the budgets of a process from 1; no number is reused. Parent is that of the
	// budget that this one's memory counts in, too, or 0.
	Serial int    `json:"serial"`
	Parent int    `json:"parent,omitempty"`
	Name   string `json:"name,omitempty"`
	// Limit is 0 if there is none. Committed is the memory that the owners have, which does not
	// include what is suspended, and Peak the most that it ever was.
	Limit     int `json:"limit,omitempty"`
	Committed int `json:"committed"`
	Peak      int `json:"peak"`
	// Owners have the memory, the one with most first. A summary leaves them out.
	Owners []BudgetUse `json:"owners,omitempty"`
}

// BudgetUse is the memory of one owner: a buffer, a pool, an allocation.
type BudgetUse struct {
	Kind      string `json:"kind"`
	Name      string `json:"name,omitempty"`
	Tag       string `json:"tag,omitempty"`
	Committed int    `json:"committed"`
	InUse     int    `json:"in_use"`
}

// Publication is memory that this process publishes, in the buffer at Ptr.
type Publication struct {
	Name       string  `json:"name"`
	Ptr        Address `json:"ptr"`
	Generation uint64  `json:"generation"`
	Bytes      int     `json:"bytes"`
	// Pinned is memory that is no longer published but still mapped, summed over the
	// followers.
	Pinned int `json:"pinned,omitempty"`
	// Suspended: its memory is, and its followers show nothing until that is resumed.
	Suspended bool     `json:"suspended,omitempty"`
	Followers []Reader `json:"followers,omitempty"`
}

// Reader is a follower as its publisher sees it.
type Reader struct {
	// PID and UID are 0 and nil if the process is not known.
	PID        int       `json:"pid,omitempty"`
	UID        *int      `json:"uid,omitempty"`
	Since      time.Time `json:"since"`
	Generation uint64    `json:"generation"`
	Bytes      int       `json:"bytes"`
	Pinned     int       `json:"pinned,omitempty"`
	// Refused is why the follower did not take the last generation, or empty.
	Refused string `json:"refused,omitempty"`
}

// Follower is a publication of another process that this process follows.
type Follower struct {
	Name string  `json:"name"`
	Ptr  Address `json:"ptr"`
	// PID is the publisher's, 0 if it is not known.
	PID        int    `json:"pid,omitempty"`
	Generation uint64 `json:"generation"`
	Bytes      int    `json:"bytes"`
	// Suspended: its publisher's memory is, and it shows nothing until that is resumed.
	Suspended bool `json:"suspended,omitempty"`
	// Stuck is why the follower makes no progress, or empty.
	Stuck string `json:"stuck,omitempty"`
}

// Lease is memory that is kept for other processes to import.
type Lease struct {
	Bytes int       `json:"bytes"`
	Until time.Time `json:"until"`
	// Importers are the pids of the processes that have imported it.
	Importers []int `json:"importers,omitempty"`
}

// Leftover is what an operation could not give back. The library tries it again.
type Leftover struct {
	// What is its kind: "memory", "event", "stream", "address range".
	What  string `json:"what"`
	Bytes int    `json:"bytes,omitempty"`
	// Device is nil if it is of none.
	Device *int `json:"device,omitempty"`
	// Error is of the last try.
	Error string `json:"error"`
}

// Stack is a stack of functions, the innermost first, each as "function
// (file:line)".
type Stack []string

// String returns the stack with a function on each line.
func (s Stack) String() string { return strings.Join(s, "\n") }
