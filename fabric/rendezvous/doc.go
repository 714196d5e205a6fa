// Package rendezvous lets the ranks of a group agree before they share memory:
// goroutines of one process, processes of one host, or, over etcd, of several
// hosts.
//
// All ranks call the same steps in the same order. A step gives every rank what
// all others contribute (AllGather, Exchange, which also carries file
// descriptors, Barrier), so no rank goes on before all have arrived. Every step
// has a time limit.
//
// # Outcomes
//
// A step has one outcome for all ranks: either it is complete for all, or every
// rank gets the same error, which names the ranks at fault: one that died or left
// (peer.ErrGone), gave up (ErrFailed), is at another step (ErrDisagree) or did
// not arrive in time (peer.ErrTimeout). A rank that dies after all have
// arrived at a step fails the next one. After an error the group is over; the
// same processes can make a new one.
//
// The exception is the host's process, which decides the outcomes: if it dies,
// a step may be complete for some ranks and not for others, which get
// peer.ErrGone with rank 0. If it hangs, a rank gives up on it a second
// after the limit.
//
// Agree settles on one type of handle for all, and Share has every rank map every
// other rank's memory by it.
//
// Contexts must not be nil.
//
// # Trust
//
// A Transport carries a group. This package has one for goroutines (InProcess)
// and one for the processes of a host (Host, Join); the module
// fabric/rendezvous/etcd has one for several hosts.
//
// The host's socket admits processes of the host's user alone, and they trust each other.
// A member of a group can end it,
// by failing or by violating the protocol, which expels it. It cannot speak
// for another rank, nor make the host keep more than two steps' contributions:
// one for each rank and step, of at most MaxBody bytes and MaxFiles files.
package rendezvous
