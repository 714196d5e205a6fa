package peer

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/link"
)

// FD owns a file descriptor, which is closed on exec. Its methods are safe for
// concurrent use. The owner closes it.
//
// An open descriptor of GPU memory pins that memory. An FD that the garbage collector
// finds without Close is counted, reported ([TraceFDs]) and closed: unlike an address,
// its number is lent for the duration of a call only, so nothing else can have it.
type FD struct {
	owned
	s       *descriptor
	cleanup runtime.Cleanup
}

// owned lets the packages above reach the inner state.
type owned = link.Holder[*descriptor]

// descriptor is the inner state, which the collector's cleanup holds.
type descriptor struct {
	n      int
	closer life.Closer
	ending life.Ending // of the file, which may be closed later than the number is given up
	stack  []uintptr
	// foreign: another process chose the file, and so how long its close takes.
	foreign atomic.Bool
}

// fds has the counts of this process, whose limit of open files they share.
var fds struct {
	open, lost atomic.Int64
	log        atomic.Pointer[slog.Logger]
}

// TraceFDs records the creation stack of every FD from now on, and logs each FD that is
// lost without Close. A nil logger ends it.
func TraceFDs(log *slog.Logger) { fds.log.Store(log) }

// OpenFDs returns how many FDs of this process are open.
func OpenFDs() int { return int(fds.open.Load()) }

// LostFDs returns how many FDs the collector found without Close.
func LostFDs() int { return int(fds.lost.Load()) }

// NewFD takes ownership of the file descriptor n, and has it closed on exec. After an
// error n is still the caller's.
func NewFD(n int) (*FD, error) {
	if err := fd.Take(n); err != nil {
		if errors.Is(err, syscall.EBADF) {
			return nil, errs.PeerCause(err, "peer.NewFD", cuda.ErrInvalidArgument, fmt.Sprintf("file descriptor %d", n), "pass one that is open")
		}
		return nil, errs.SystemCall("peer.NewFD", fmt.Sprintf("file descriptor %d", n), err)
	}
	return own(n), nil
}

// own takes ownership of a descriptor that is known to be open and closed on exec.
func own(n int) *FD {
	s := &descriptor{n: n}
	if fds.log.Load() != nil {
		pcs := make([]uintptr, 32)
		s.stack = pcs[:runtime.Callers(3, pcs)]
	}
	fds.open.Add(1)
	f := &FD{owned: link.Hold(s), s: s}
	f.cleanup = runtime.AddCleanup(f, (*descriptor).lose, s)
	return f
}

// received takes ownership of a descriptor that another process sent.
func received(n int) *FD {
	f := own(n)
	f.s.foreign.Store(true)
	return f
}

// SetForeign sets whether another process chose the file. A file that the driver, or the
// library, has recognised as its own kind is no longer foreign.
func (s *descriptor) SetForeign(foreign bool) { s.foreign.Store(foreign) }

// close closes the descriptor, that of a foreign file on another goroutine, which closes
// done at its end.
func (s *descriptor) close() (done <-chan struct{}, err error) {
	// The system releases the number even if close fails, so there is no retry.
	_ = s.closer.Close(func() error {
		if s.foreign.Load() {
			done = fd.Away(func() {
				_ = fd.Close(s.n)
				s.ending.End(nil)
			})
		} else {
			err = fd.Close(s.n)
			s.ending.End(nil)
		}
		fds.open.Add(-1)
		return nil
	})
	return done, err
}

func (s *descriptor) lose() {
	fds.lost.Add(1)
	if log := fds.log.Load(); log != nil {
		log.Warn("cuvmm: a file descriptor was lost without Close; it is closed now",
			"fd", s.String(), "hint", "call Close on it, or File to hand it over")
	}
	_, _ = s.close()
}

// String names the descriptor, with its creation stack if FDs were traced.
func (s *descriptor) String() string {
	text := fmt.Sprintf("file descriptor %d", s.n)
	if len(s.stack) == 0 {
		return text
	}
	var b strings.Builder
	b.WriteString(text + ", made at")
	frames := runtime.CallersFrames(s.stack)
	for {
		f, more := frames.Next()
		if f.Function != "" && !strings.HasPrefix(f.Function, "runtime.") {
			fmt.Fprintf(&b, "\n\t%s\n\t\t%s:%d", f.Function, f.File, f.Line)
		}
		if !more {
			return b.String()
		}
	}
}

// String names the descriptor: "file descriptor 7".
func (f *FD) String() string {
	if f == nil || f.s == nil {
		return "no file descriptor"
	}
	return fmt.Sprintf("file descriptor %d", f.s.n)
}

// hold keeps the descriptor open until f.s.closer.Release.
func (f *FD) hold(op, what string) error {
	switch {
	case f == nil || f.s == nil:
		return errs.PeerInvalid(op, what+" is nil", "pass an open one, as NewFD and Receive return")
	case !f.s.closer.Acquire():
		return errs.PeerClosed(op, what)
	}
	return nil
}

// Use calls the function with the number, which it must neither keep nor close. The FD
// stays open until the function returns; Close waits for that, so the function must not
// call it.
func (f *FD) Use(do func(n int) error) error {
	const op = "peer.FD.Use"
	if do == nil {
		return errs.PeerInvalid(op, "no function", "pass the function that uses the number")
	}
	if err := f.hold(op, "file descriptor"); err != nil {
		return err
	}
	defer runtime.KeepAlive(f)
	defer f.s.closer.Release()
	return do(f.s.n)
}

// Dup returns another descriptor of the same file. The caller closes it.
func (f *FD) Dup() (*FD, error) {
	const op = "peer.FD.Dup"
	if err := f.hold(op, "file descriptor"); err != nil {
		return nil, err
	}
	defer runtime.KeepAlive(f)
	defer f.s.closer.Release()
	n, err := fd.Dup(f.s.n)
	if err != nil {
		return nil, errs.SystemCall(op, f.String(), err)
	}
	d := own(n)
	d.s.foreign.Store(f.s.foreign.Load()) // the last descriptor that is closed closes the file
	return d, nil
}

// File closes the FD and returns a file that owns the descriptor.
func (f *FD) File(name string) (*os.File, error) {
	if f == nil || f.s == nil {
		return nil, errs.PeerInvalid("peer.FD.File", "file descriptor is nil", "pass an open one, as NewFD and Receive return")
	}
	var file *os.File
	_ = f.s.closer.Close(func() error {
		file = os.NewFile(uintptr(f.s.n), name)
		fds.open.Add(-1)
		f.cleanup.Stop()
		f.s.ending.End(nil)
		return nil
	})
	if file == nil {
		return nil, errs.PeerClosed("peer.FD.File", "file descriptor")
	}
	return file, nil
}

// Released returns the end of the FD's closing: the file is closed, even one that
// another process sent and whose close takes long, or File has handed it over. It can be
// obtained at any time.
func (f *FD) Released() cuda.Completion {
	if f == nil || f.s == nil { // as Close, which has nothing to close either
		var none life.Ending
		none.End(nil)
		return none.Completion()
	}
	return f.s.ending.Completion()
}

// Close waits for running calls of Use and closes the descriptor. The close of a file
// that another process sent may take for ever: Close returns after a second then, and the
// kernel goes on closing. Idempotent.
func (f *FD) Close() error {
	if f == nil || f.s == nil {
		return nil
	}
	f.cleanup.Stop()
	done, err := f.s.close()
	if done != nil {
		fd.Await(done)
	}
	if err != nil {
		return errs.SystemCall("peer.FD.Close", f.String(), err)
	}
	return nil
}

// CloseAll closes descriptors, foreign files concurrently, so that it waits no longer
// than Close does for one. It skips nil ones.
func CloseAll(all []*FD) error {
	var failed []error
	var away []<-chan struct{}
	for _, f := range all {
		if f == nil || f.s == nil {
			continue // a message that was never sent may have nil ones
		}
		f.cleanup.Stop()
		done, err := f.s.close()
		if err != nil {
			failed = append(failed, errs.SystemCall("peer.FD.Close", f.String(), err))
		}
		if done != nil {
			away = append(away, done)
		}
	}
	fd.Await(away...)
	return errors.Join(failed...)
}
