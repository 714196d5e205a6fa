// Package rendezvous lets the ranks of a group agree before they share memory:
// goroutines of one process, processes of one host, or, over etcd, of several
// hosts.
//
// All ranks call the same steps in the same order. A step hands every rank what
// every other has brought (AllGather, Exchange, which also carries file
// descriptors, Barrier), so none goes on before all have arrived. Every step has
// a limit in time. Who does not arrive is named: a rank that ended, that gave
// up, that is at another step, or that is just not there.
//
// A group fails as a whole. When a rank gives up, or is lost while others need
// it, every rank's step answers an error, now and from then on; no rank falls
// back alone. The same processes can make a new group afterwards.
//
// Agree settles on one type of handle for all, and Share has every rank map every
// other one's memory by it.
//
// A Board is what carries a group. This package has one for goroutines (InProcess)
// and one for the processes of a host (Host, Join); the module
// fabric/rendezvous/etcd has one for several hosts. The processes of a group
// trust each other: whoever may join it can end it.
package rendezvous
