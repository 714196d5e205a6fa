package vmm

import (
	"context"
	"fmt"
	"runtime/debug"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/suspend"
)

// OnSuspend has functions called before and after the memory behind an object's addresses changes,
// for a program that registered the addresses elsewhere: with a collective library, or for RDMA.
//
// leave is called within Suspend, or in the background of SuspendAfter, when all work that could
// use the memory is done, and before any of it goes. It gives the registration up. Operations of
// the object return ErrSuspended by then, and leave must not close it. Its error, or a panic,
// refuses the suspension, which is undone.
//
// back is called once the object can be used again and before Resume returns, also after a
// suspension that was undone when leave had been called. It registers the addresses anew, behind
// which there is other memory now. Several functions are called in the order of their OnSuspend.
// Both are called for the object as a whole, even if all of its memory stays.
//
// For the array of a publish.Follower they are called when its publisher suspends the memory: leave
// before the follower unmaps it, when its streams have released what they read, and back when there is memory again,
// before Next shows it. An error of leave is returned by the publisher's Suspend. Neither may wait for the follower.
//
// After remove they are not called any more, but for the back of a leave that was.
func OnSuspend(m Memory, leave func(ctx context.Context) error, back func()) (remove func(), err error) {
	const op = "vmm.OnSuspend"
	in := suspend.Of(m)
	if in == nil {
		return nil, errs.Invalid(op, "nil memory", "pass a buffer, array, mapping or Sparse that was made by this package")
	}
	if leave == nil || back == nil {
		return nil, errs.Invalid(op, "no function", "pass one to call before the memory goes, and one for when it is back")
	}
	if err := in.Acquire(op); err != nil {
		return nil, err
	}
	defer in.Release()
	return in.Status().AddRegistrant(&suspend.Registrant{Back: back, Leave: func(ctx context.Context) error {
		if err := returned(in.System(), "the function of OnSuspend", func() error { return leave(ctx) }); err != nil {
			return errs.New(errs.Failure{Op: op, Asked: in.What() + " refuses to be suspended", Err: err, Hint: "suspend again when that function permits it, or remove it"})
		}
		return nil
	}}), nil
}

// returned calls a function of the user, and returns a panic of it, or the end of its goroutine,
// as an error. The stack of a panic is in the log: another process may be told the error.
func returned(sys *core.System, what string, f func() error) (err error) {
	ended := make(chan struct{})
	go func() { // of its own, since runtime.Goexit would leave the caller's locks and states
		defer close(ended)
		defer func() {
			if p := recover(); p != nil {
				sys.Config.Log.Error("cuvmm: a function of the user panicked", "function", what, "panic", p, "stack", string(debug.Stack()))
				err = fmt.Errorf("%s panicked: %v (the log of its process has the stack)", what, p)
			}
		}()
		err = fmt.Errorf("%s ended its goroutine (runtime.Goexit, as FailNow of a test does)", what)
		err = f()
	}()
	<-ended
	return err
}
