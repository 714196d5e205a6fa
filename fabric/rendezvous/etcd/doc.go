// Package etcd carries a rendezvous group over an etcd server, so that its ranks
// may run on several hosts.
//
// Each rank has a lease, and everything that it writes ends with the lease: a
// rank that dies is noticed when its lease runs out, within Options.TTL, and a
// group leaves nothing behind but what explains its end to ranks that have yet to
// join, for as long as a step may take. A group has four keys of each rank at
// most, whatever its steps; the server keeps their history until it is compacted
// (its option --auto-compaction-retention).
//
// A group outlives what ends a watch while its leases last: the server's loss of its leader,
// and a reconnect after a compaction. The rank then reads the keys again. A rank that
// ended meanwhile took its keys with it. So this rank may not see its last arrival, and then
// reports the loss at a step that was complete for others.
//
// # Trust
//
// Any client that may write keys under the prefix can end a group. With Options.Secret it
// can do nothing else: each value carries a proof over its key, which names the session,
// and a step that a rank has passed is not taken again. A session's name is used once, since
// a value is valid in another group of that name. The members, which have the secret, trust
// each other. What is on the server can be read by all its clients.
package etcd
