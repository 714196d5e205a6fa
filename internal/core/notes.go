package core

// # How closing waits for the GPU
//
// The driver unmaps and frees at once, even memory in use. So each operation that takes
// memory away has two forms.
//
// With streams (CloseAfter, ClipAfter): one event per stream is
// recorded, in the stream's own context, and the reclaimer tears down when all
// events have passed. A capturing stream cannot be marked. The library asks before
// the record and again after it, because a capture may begin in between; in that
// case it destroys the event without querying it, the operation returns
// ErrCapturing, and nothing has changed.
//
// Without streams (Close, Clip, lowering access): the caller waits for the devices
// that have access. It first waits by events for the streams that have work of this
// library. A stream is on its context's list of busy streams from its first
// operation until it was waited for (Stream.Settled), so idle streams cost no
// driver call. For work on streams that the library does not know, it then
// frees a 256-byte block that each known context owns: that free waits for all work
// of the context and disturbs no capture. It stalls launches of other threads into
// the context, so it comes last, and Options.NamedStreamsOnly skips it, unless a
// known stream captures, whose event would tell nothing. cuCtxSynchronize is never
// called, because it ends captures.
//
// # The reclaimer
//
// Operations that acquire memory, System.Drain, and one goroutine that exists only
// while something is pending advance the reclaimer (reclaim.go). With nothing
// pending it costs one atomic load. Objects that wait for the same stream stand in
// a line in the order of their marks, and only the first mark of a line is queried;
// an operation does a bounded part of what is ready. So neither the number of
// pending objects nor the number of streams slows an operation down.
//
// Only the reclaimer uses an object that it tears down. For its part in an object
// that lives (a clip) it waits for no lock: the teardown returns
// life.ErrAgain if it would have to, and is called again. Hooks of users
// (Graph.OnClose) run on a goroutine of their own, without any lock.
//
// # Late work
//
// An operation that runs on an object while CloseAfter is called may put work on a
// stream behind the fence. If any operation ran, the fence therefore covers every
// known stream once more after those operations have ended.
//
// A fence that covers a capturing stream passes when the capture has ended. An
// operation in the body of that capture does not wait for such a fence
// (Fence.HeldByCapture): it waits for the devices as a whole, as Close does, which
// a capture does not prevent.
//
// # Work of unknown end
//
// An operation can fail after the driver has accepted its work, and then its caller assumes
// that the work was not done, and names its stream nowhere. Such an operation calls
// Stream.Unsettle (unsettled.go), and so does a Synchronize that fails. The stream then counts
// for every fence and for every block that a pool is given back, and an append comes behind it,
// until a mark that was recorded later has passed. Managed memory needs none of this: the
// driver frees it behind all work of the context.
//
// # Undoing, and what is left
//
// An operation that fails takes back what it built with an Undo (undo.go), the last part
// first. What the driver refuses to release goes to one list of leftovers (leftovers.go),
// since no object of the user stands for it. It is tried again by a timer, with growing pauses, by every Drain,
// by an allocation that lacks memory, and by System.Close, which retires the System only
// once nothing is left, and names what remains as the library's own. A try never waits: what
// GPU work may still use goes to the reclaimer first, with a fence.
//
// # Before an allocation is refused
//
// System.Allocate escalates and tries again after each step: it tears down what has
// passed, tries the leftovers, gives a teardown on another goroutine some milliseconds, and asks the
// holders of spare memory to free some (System.OnPressure). It repeats this while
// more memory is to come, within the bound of Options.AllocationWait. A failed
// try is followed by another if any memory came free after the try began.
//
// # Loss
//
// A result that means a lost context is recorded (loss.go). Loss is a state of a
// context, and of its device, because memory belongs to devices. If the failed call
// named a context, that context is lost. If it named none, as all calls of virtual
// memory, the library asks the contexts of the devices that the call concerned; if
// none of them admits the loss, all of them count as lost: keeping everything is
// safe, and going on is not.
//
// On a lost device waits return at once and nothing is made. Closing makes the driver
// calls that it always makes, and takes any refusal as done (Context.Teardown). The
// software driver gives everything back; a real one may refuse everything until the
// process ends. What it refuses to unmap may still be mapped, so a reservation with such a
// place takes no further mapping. The operation that notices the loss returns
// ErrDeviceLost, and the log has it once. Other devices go on: their work is waited for,
// and their memory is freed, even if the lost device had access. Pinned memory that was in
// use at the loss is kept until the System closes, because no wait for that context
// succeeded; pinned memory taken later is reused.
//
// It is measured that a lost context fails every later call and that the process
// goes on. It is assumed, and the software driver behaves so, that the contexts of
// other devices stay whole and that calls without a context work for their memory.
// No test provokes a real loss. A result that contradicts the assumption counts as
// the loss of what it concerned.
