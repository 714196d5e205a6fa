package inspect

// # How a snapshot is read
//
// Notes for readers of the source; the package document is for users.
//
// Take reads what the owners keep anyway; nothing is counted or recorded for it. Of managed
// memory, whose pages only the driver knows, it queries the last prefetch of each allocation,
// and where its pages are if the driver can tell (driver.Locator). The
// list of live objects names the owner of each (life.Owner). Pools, publications,
// followers and leases are not objects of the driver, and register with core.System.Show.
//
// Each is read under its own lock, in steps if it may be large: 256 objects of the live
// list, whose cursor is an object without an owner (life.List.Each), 1,024 mappings of a
// range, 1,024 blocks of a pool. After each step in a pool the walk yields, so that
// a request that waits for the lock gets it. Anything may move between two steps; the walk
// then finds its place again by the chunks' tables (vmm/pool/segments.go). Stacks are
// turned into text with no lock held. So the parts of a snapshot differ in time, and a
// mapping may name memory that is not listed.
