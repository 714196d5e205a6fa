package rendezvous

// # How a group agrees
//
// Notes for readers of the source; the package document is for users.
//
// A Group runs a replicated state machine (state.go) over a transport (goroutines, a
// socket, etcd), which delivers the events of all ranks, each rank's own included, in
// one order. The outcome of a step depends on that order alone, so all ranks reach the
// same one and none has to tell another. A rank that gives up announces it through the
// same order and then takes the outcome from it: if the last arrival came first, the
// step is complete for that rank too.
//
// On a host rank 0 is the sequencer. It runs the state machine as well, so that it only
// relays what counts. It expels a rank that arrives out of turn, or arrives without
// reading, which bounds what the host keeps.
//
// Over etcd the revisions of the server are the order. A rank's keys end with its lease,
// and only its latest two arrivals are kept: a rank that arrives at a step shows that no
// rank needs the step before the last. A rank that joins and finds a later step than the
// first is therefore not of that group.
//
// Share is two steps: the offers travel, and a barrier says that all have imported.
// Until then each rank's lease holds what the rank offered, a little longer than both
// steps may take. A rank that fails ends the group, and every rank closes what it had
// mapped.
