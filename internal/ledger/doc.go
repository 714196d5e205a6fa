// Package ledger keeps the books of a machine that several processes share: how
// much of its memory is taken, and which processes hold it.
//
// A machine is a folder. Its file "machine" has a record for each holder (an
// opening of the machine, so usually a process) and for each piece of shared
// memory, which is a file of its own. What is taken of a pool of memory is the
// sum of what each holder keeps to itself and of the memory files that are
// held: by a holder, whose record has a bit for each, or by an exported
// descriptor that is open anywhere, in a socket's queue too.
//
// A process may be killed at any moment, so nothing is kept that only a living
// process could put right:
//
//   - a holder lives as long as the lock on its byte, which the kernel drops
//     with the process; then its record means nothing;
//   - an exported descriptor holds a lock on its file, which the kernel drops
//     with the last duplicate;
//   - there are no totals, only what they are the sums of, each a word that
//     changes at once, in an order in which every prefix of a change is a state
//     like any other;
//   - each process that reads the books, under the one lock of all transactions,
//     sweeps out what is over. That lock, too, goes with its process; a process that is
//     stopped in the middle of a transaction, which takes microseconds, holds
//     the others up until it goes on or is killed.
//
// The records have fixed places, so the file has the same size for ever.
package ledger
