package pages

// # How pages move
//
// Notes for readers of the source; the package document says what the package is for.
//
// A page is physical memory of one size. A place is where it is mapped in a [Range]. What is
// freed stays where it is, mapped, until its memory or its addresses are wanted. So a program
// that frees and maps the same places again makes no driver call, and one that maps others
// pays for what it moves.
//
//	place   what is mapped there        Map                              Unmap, UnmapAfter  Close
//	hole    nothing, or the null page   acquires a page, and maps it     stays              nothing to do
//	live    a page, in use here         stays                            becomes old        unmapped
//	old     a page, not in use here     a free page becomes live again;  stays              unmapped
//	                                    another one is unmapped first
//	stuck   the driver did not unmap    tries again, or refuses          stays              tries again
//
// A page is in use while one of its places is live, and free otherwise. Free pages are on one
// of the lists of their [Source]:
//
//	stock   the page is mapped nowhere
//	ready   its places are old, and the GPU has passed the work there
//	queue   of a stream (lane): work of that stream has yet to be passed
//
// A page with a stuck place is on no list until the place is unmapped.
//
// A change holds the pages that it moves: those that it takes from the lists or makes, those that
// it maps once more, and the one that it replaces. A held page is on no list. What frees a place of
// it meanwhile, for which no turn is needed, leaves it to the change, which files it when it ends.
// Each page is held once, so it is filed and given back once, however many places it has. A
// Replace holds the page that it copies to for as long as the copy runs, and other changes pass it
// by: they may unmap places where it lay before.
//
// Another place takes a free page from the stock, then from the ready ones, the longest free
// first, and then from the queue of the stream that is to use it, whose order is the order of
// use whichever address its work names (measured: docs/driver-facts.md). In the last case the
// old place is still mapped, and the page has two places until the GPU has passed the old one.
// It costs no memory, and it is unmapped by a later Map of any range of the source, or when it
// is wanted. New pages are made only if these are not enough.
//
// # When the GPU has passed
//
// A free stamps its place with the epoch of each stream that it names (internal/epoch), and of
// each on which this library has copied from or to the range. No driver call is made for that.
// Only a Map that wants what has not passed records an event, one for any number of frees.
//
// # Who may change what
//
// Source.turn is held over a change of any range of the source, with its driver calls, but not
// over waits for the GPU: a change that would have to wait undoes nothing, because it has
// changed nothing, lets go and begins anew. Source.mu guards pages, places and lists, and is
// held for short steps. So UnmapAfter waits for no driver call. Range.mu guards what copies
// ask: which places are live. A copy holds it for reading from its check to its submission, and
// a free for writing.
//
// # Failure
//
// Map creates first and unmaps last, so what is refused most often has changed nothing. What it
// has mapped when a later run fails is unmapped, new pages are released, and others go back to
// the lists. Unmapping goes forward: a run that fails is tried again page by page, and places
// that the driver does not unmap are stuck.
//
// # The null page
//
// A hole with the null page is mapped, so it changes by an unmapping and a mapping, between
// which work in the hole fails. A range with one therefore waits, before it maps or unmaps, for
// the devices that can reach it, and other ranges do not take its old pages: only its own Map,
// which has waited, does.
