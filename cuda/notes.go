package cuda

// # How copies, captures and callbacks work
//
// Notes for readers of the source; the package document is for users.
//
// # Copies from and to Go memory
//
// The driver never receives a pointer to Go's memory. Stream.Upload and Download
// go through a ring of pinned slots (ring.go) that belongs to the stream, so that
// a stalled stream holds up no other. The slots are pinned in the context of the
// stream's Device: a borrowed stream may run in a context that ends when the
// stream is closed, and memory that was pinned there would end with it.
//
// The driver stalls launches while it unpins memory. So pinned memory comes from a
// pool, which returns it to the operating system only when the System closes or
// TrimHost is called.
//
// # Captures
//
// The driver ties a capture to the thread that began it. Stream.WithCapture
// therefore locks its goroutine to the thread while the body runs, and ends the
// capture even if the body fails, panics or ends its goroutine.
//
// What the body uploads is staged in pinned memory that the graph owns, found by
// the driver's capture ID, so that streams which joined the capture through an
// event are served too. An upload into a capture that another library began is
// refused: the library cannot know when that graph ends and its memory may go.
//
// A stream whose handle the library never gave out can only begin a capture
// through the library, so Stream.MayCapture needs no driver call for it
// (internal/core/capturestate.go).
//
// # Callbacks
//
// No Go may run on the driver's thread that calls a host function: Go could stop that
// thread, and the function may make no CUDA call. So the driver calls a C function,
// which writes the function's number into a pipe (csrc/hostfunc.c); a goroutine reads
// it and puts the user's function into the stream's queue (calls in callback.go).
//
// A mark behind the call goes to the reclaimer. When it has passed, the host function
// is released by a message through the same pipe, behind all calls of it. If none came
// by then the context is lost, and the user's function is called with that error: so it
// is called exactly once, and Drain, which waits for the reclaimer, waits for it. A
// graph owns the host functions that were captured, and releases them when it is
// destroyed. A mark behind each of its launches goes to the reclaimer, too, and then a
// message through the pipe, so that Drain waits for the calls of the launch.
//
// # Errors
//
// Below this package a failure is an errs.Failure, which becomes an *Error here.
// What a driver's code means for a call, and what to do about it, is one table,
// explain.go.
//
// # Systems
//
// All users of the real driver in a process share one System, which counts its
// opens. The lock over them is held over opening alone. Contexts are retained
// when a Device is first used, under Device.mu.
