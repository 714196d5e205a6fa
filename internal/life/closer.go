package life

import (
	"errors"

	"github.com/cuvmm/cuvmm/internal/lock"
)

// ErrAgain is what a teardown returns when it would have to wait: the reclaimer calls
// it again later.
var ErrAgain = errors.New("again")

// Closer closes an owner: once, from any goroutine, and again after a teardown that
// failed. It embeds the Life that operations hold.
type Closer struct {
	Life
	completion
	mu   lock.Mutex[lock.Long]
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
	c.ended(err)
	return err
}

// ended notes how a teardown ended. The caller holds mu.
func (c *Closer) ended(err error) {
	c.gone = err == nil
	c.end(err)
}

// Fence stands for work that must end before a teardown.
type Fence interface {
	// AddAllStreams adds the work on all streams, for work of which it is not known
	// where it runs.
	AddAllStreams()
}

// Reclaimer runs teardowns later.
type Reclaimer[F Fence] interface {
	// Reclaim calls teardown once the fence has passed and no operation runs on the
	// closed life, and again for as long as it returns ErrAgain. It waits for nothing.
	Reclaim(f F, l *Life, teardown func() error)
}

// CloseAfter takes the object out of use at once and leaves the teardown to
// the reclaimer, for when the fence has passed and no operation runs on the
// object. It waits for nothing, and does nothing while a Close runs. If the
// fence cannot be made nothing is changed. After a Close that failed it makes the
// teardown go on; if the teardown fails, Close may take it up again.
func CloseAfter[F Fence](c *Closer, r Reclaimer[F], fence func() (F, error), teardown func() error) error {
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
		f.AddAllStreams() // an operation's work may lie on either side of the fence
	}
	c.gone = true
	r.Reclaim(f, &c.Life, func() error {
		err := teardown()
		if errors.Is(err, ErrAgain) {
			return err
		}
		c.mu.Lock() // a Close that takes the teardown up reports its end after this one's
		defer c.mu.Unlock()
		c.ended(err)
		return err
	})
	return nil
}
