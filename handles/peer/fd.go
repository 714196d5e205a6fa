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
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/peererr"
)

// FD owns a file descriptor, always one that is closed on exec. Its methods
// are safe for use by any goroutine at any time.
//
// An open descriptor of GPU memory keeps that memory taken, so its owner closes
// it. One that the collector finds without Close is counted and reported
// ([TraceFDs]) and closed: unlike an address, its number is lent for the time
// of a call only, so nothing else can have it.
type FD struct {
	owned
	s       *descriptor
	cleanup runtime.Cleanup
}

// owned lets the packages above reach the inner state.
type owned = link.Holder[*descriptor]

// descriptor is the inner state: what the collector's cleanup holds.
type descriptor struct {
	n      int
	closer life.Closer
	ending life.Ending // of the file, which may be closed later than the number is given up
	stack  []uintptr
	// foreign: another process chose the file, so that closing it may take as
	// long as that likes.
	foreign atomic.Bool
}

// fds counts for the process, as its limit of open files does.
var fds struct {
	open, lost atomic.Int64
	log        atomic.Pointer[slog.Logger]
}

// TraceFDs has the creation stack of every FD kept from now on, and each lost
// one reported to the logger. A nil logger ends it.
func TraceFDs(log *slog.Logger) { fds.log.Store(log) }

// OpenFDs is how many file descriptors the FDs of this process hold open.
func OpenFDs() int { return int(fds.open.Load()) }

// LostFDs is how many FDs the collector found without Close.
func LostFDs() int { return int(fds.lost.Load()) }

// NewFD takes over the file descriptor n, and has it closed on exec. After an
// error it is still the caller's.
func NewFD(n int) (*FD, error) {
	if err := fd.Take(n); err != nil {
		if errors.Is(err, syscall.EBADF) {
			return nil, peererr.Wrap(err, "peer.NewFD", cuda.ErrInvalidArgument, fmt.Sprintf("file descriptor %d", n), "pass one that is open")
		}
		return nil, peererr.System("peer.NewFD", fmt.Sprintf("file descriptor %d", n), err)
	}
	return own(n), nil
}

// own takes over a descriptor that is known to be open and closed on exec.
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

// received takes over a descriptor that another process sent.
func received(n int) *FD {
	f := own(n)
	f.s.foreign.Store(true)
	return f
}

// SetForeign says whether another process chose the file. One that the driver, or the
// library, has taken for one of its own is not foreign any more.
func (s *descriptor) SetForeign(foreign bool) { s.foreign.Store(foreign) }

// close gives the number back, a foreign file's on a goroutine of its own: then
// done is closed when it is closed.
func (s *descriptor) close() (done <-chan struct{}, err error) {
	// The number is given back even if close fails, so there is no second try.
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

// String names the descriptor, with the stack that made it where FDs were
// traced.
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
		return peererr.Invalid(op, what+" is nil", "pass an open one, as NewFD and Receive return")
	case !f.s.closer.Acquire():
		return peererr.Closed(op, what)
	}
	return nil
}

// Use lends the number to the function, which must neither keep it nor close
// the FD: it stays open until the function returns, and Close waits for that.
func (f *FD) Use(do func(n int) error) error {
	const op = "peer.FD.Use"
	if do == nil {
		return peererr.Invalid(op, "no function", "pass the function that uses the number")
	}
	if err := f.hold(op, "file descriptor"); err != nil {
		return err
	}
	defer runtime.KeepAlive(f)
	defer f.s.closer.Release()
	return do(f.s.n)
}

// Dup is another descriptor of the same file. The caller closes it.
func (f *FD) Dup() (*FD, error) {
	const op = "peer.FD.Dup"
	if err := f.hold(op, "file descriptor"); err != nil {
		return nil, err
	}
	defer runtime.KeepAlive(f)
	defer f.s.closer.Release()
	n, err := fd.Dup(f.s.n)
	if err != nil {
		return nil, peererr.System(op, f.String(), err)
	}
	d := own(n)
	d.s.foreign.Store(f.s.foreign.Load()) // the last descriptor that is closed closes the file
	return d, nil
}

// File hands the descriptor over: the file owns it now, and the FD is closed.
func (f *FD) File(name string) (*os.File, error) {
	if f == nil || f.s == nil {
		return nil, peererr.Invalid("peer.FD.File", "file descriptor is nil", "pass an open one, as NewFD and Receive return")
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
		return nil, peererr.Closed("peer.FD.File", "file descriptor")
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

// Close closes the descriptor, after waiting for the calls of Use that run. A
// file that another process sent may be one whose close takes for ever: then
// Close returns after a second, and the kernel goes on with it. The second Close
// does nothing.
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
		return peererr.System("peer.FD.Close", f.String(), err)
	}
	return nil
}

// CloseAll closes descriptors, those of other processes concurrently, so that it waits
// no longer than Close does for one. Nil ones are left out.
func CloseAll(all []*FD) error {
	var errs []error
	var away []<-chan struct{}
	for _, f := range all {
		if f == nil || f.s == nil {
			continue // a message that was never sent may have such
		}
		f.cleanup.Stop()
		done, err := f.s.close()
		if err != nil {
			errs = append(errs, peererr.System("peer.FD.Close", f.String(), err))
		}
		if done != nil {
			away = append(away, done)
		}
	}
	fd.Await(away...)
	return errors.Join(errs...)
}
