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
// # Trust
//
// Any client that may write keys under the prefix can end a group. With
// rendezvous.Options.Secret it can do nothing else: each value carries a proof over its
// key, which names the session. A session's name is used once, since a value is valid in
// another group of that name.
//
// A member cannot speak for a rank that has joined: each process draws a key pair when it
// joins, publishes the public key as its rank, and signs what it writes. Towards ranks that
// have yet to join it can take the place of a rank that it removes, or name another rank
// as the reason of the group's end, so members with the secret trust each other that far.
// What is on the server can be read by all its clients.
package etcd
