// Package etcd carries a rendezvous group over an etcd server, so that its ranks
// may run on several hosts.
//
// Each rank has a lease, and everything that it writes ends with the lease: a
// rank that dies is noticed when its lease runs out, within Options.TTL, and a
// group leaves nothing behind. Whoever may write to the server's keys under the
// prefix may join a group and end it, so the server has to let in nobody else.
package etcd
