package multicast

// # How teams form and end
//
// Notes for readers of the source; the package document is for users.
//
// A multicast object is one more holder of a phys.Handle: it is mapped, exported and
// released as memory is, but takes no memory and counts as none
// (internal/phys/multicast.go). A binding holds a count of the object and of the
// memory, and unbinds exactly what it bound.
//
// # What blocks
//
// Binding and mapping block in the driver until all devices were added, and nothing
// cancels that. If the object is not shared, only this process can add devices, so
// both are refused while one is missing (Reservation.Map gets the reason from the
// object's phys.Handle). If it is shared the library cannot know, and a Team
// provides the order. A bind that blocks holds the object's handle and not the
// Object, so that closing the Object does not block behind it.
//
// # Forming
//
// A team forms in a list of steps (form.go). In each, every rank does its part and
// reports the outcome in one exchange of the group; the ranks go on only if all
// succeeded. So no rank binds or maps before all have added their devices, and the
// creator keeps the object until all have imported it. A failure travels in the
// step's own message and does not end the group: all ranks build the same error from
// the same reports, and can use the group for another try. Only a rank that is gone
// or late ends the group. SYSTEM_NOT_READY travels in the same way: the ranks that
// were not ready try again while the others wait, eight times. There is no fallback
// inside: every rank has the same error, so all programs decide alike.
//
// A rank's part runs on a goroutine, because it may never return. Past its limit the
// team is stuck: the goroutine owns the team's objects, nothing else touches them,
// and Close returns ErrStuck until the call has returned, and then works. The lock
// of a team is held over its calls, before all locks of the objects that it is made
// of. A binding claims its part of an object under the object's lock, a leaf except
// for adding devices, which never blocks.
//
// # Waiting and releasing are apart
//
// A team waits for the work on its rank's devices in one place (team.go: passed), and
// then releases its parts without waiting again: a mapping's or a binding's own Close
// would wait for other ranks' devices, whose work may wait for this rank. A team that
// never formed was never used, and waits for nothing. What one try of a step made
// and could not finish is released before the next try.
//
// # A rank that dies
//
// leaves kernels of the others at a barrier. A time limit inside the kernel would
// have to be longer than any honest wait, and trapping would cost the context. So
// the kernels poll a word. It lies in host memory, because the CPU must reach it when
// no stream moves, and they poll it seldom, because it is far away. Leave and Close
// set it when their limit is over. An aborted Leave still coordinates: if the work of
// all ranks has ended, the replicas are released and every rank has ErrAborted. If
// the work of any rank has not, or a rank is not heard of, Leave releases nothing,
// because a replica that goes takes the context of every rank whose kernels still
// run; each rank then decides by Close.
//
// # On the software driver
//
// Sums of 16-bit elements add up in 32 bits and round once, and replicas are combined
// in another order for each unit. The tests' arithmetic is exact and shares nothing
// with the software driver's kernels (internal/test/kerneltest).
