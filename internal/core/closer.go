package core

import (
	"errors"
	"sync"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// Closer is the closing of an owner: once, from any goroutine, and again where
// the teardown failed. It embeds the Life that operations hold.
type Closer struct {
	Life
	completion
	mu   sync.Mutex
	gone bool
}

// Close takes the object out of use, waits for the operations that run on it,
// and tears it down. After an error the object stays out of use and Close may
// be called again: the teardown remembers where it is.
func (c *Closer) Close(teardown func() error) error {
	c.Life.Close() // before the lock: CloseAfter sees whether a Close runs
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return nil
	}
	c.Wait()
	err := teardown()
	c.gone = err == nil
	c.end(err)
	return err
}

// CloseAfter takes the object out of use at once and leaves the teardown to
// the reclaimer, for when the fence has passed and no operation runs on the
// object. It waits for nothing, and does nothing while a Close runs. Where the
// fence cannot be made nothing is changed. After a Close that failed it has the
// teardown go on; where the teardown fails, Close may take it up again.
func (c *Closer) CloseAfter(s *System, fence func() (*Fence, error), teardown func() error) error {
	if !c.mu.TryLock() {
		if c.Closed() {
			return nil
		}
		c.mu.Lock() // another CloseAfter has it, which waits for nothing
	}
	defer c.mu.Unlock()
	if c.gone {
		return nil
	}
	before := c.Now()
	f, err := fence()
	if err != nil {
		return err
	}
	c.Life.Close()
	if c.RanSince(before) {
		f.AddAllStreams() // of an operation's work nobody knows on which side of the fence it lies
	}
	c.gone = true
	s.Reclaim(f, &c.Life, func() error {
		err := teardown()
		if errors.Is(err, ErrAgain) {
			return err
		}
		c.mu.Lock() // a Close that takes the teardown up says its end after this one's
		defer c.mu.Unlock()
		c.gone = err == nil
		c.end(err)
		return err
	})
	return nil
}

// FenceOf marks the streams of public stream objects. No streams is an error:
// naming none is not the same as nothing running.
func FenceOf[S interface {
	comparable
	stream() *Stream
}](s *System, op string, streams []S) (*Fence, error) {
	var none S
	if len(streams) == 0 {
		return nil, errs.Invalid(op, "no streams", "name the streams whose work uses the memory, or use the form without streams (Close, Clip, SetAccess), which waits for all of it")
	}
	in := make([]*Stream, len(streams))
	for i, st := range streams {
		if st == none {
			return nil, errs.Invalid(op, "a nil stream", "name streams made with Device.NewStream or BorrowStream")
		}
		in[i] = st.stream()
	}
	return s.NewFence(op, in)
}
