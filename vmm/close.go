package vmm

import (
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// Close waits for all work that could use the buffer (see the package
// documentation) and frees its memory and address range. It is idempotent, and after
// an error it may be called again. While the buffer is published, or a Host function
// uses it, it returns ErrInUse and the buffer stays open.
func (b *Buffer) Close() error { return b.end("vmm.Buffer.Close") }

func (b *Buffer) end(op string) error {
	in := b.inner()
	if in == nil {
		return errNilBuffer(op)
	}
	if err := in.close(op); err != nil {
		return err
	}
	return in.closer.Close(func() error {
		// This waits for more than what is pending on the buffer does: a pending
		// clip that a capture holds up finds nothing to do later.
		if err := in.wait(op); err != nil {
			return err
		}
		return b.teardown(op)
	})
}

// CloseAfter takes the buffer out of use at once and frees its memory and address
// range when the work that is on the streams now is done. It never blocks. Without a
// stream it returns ErrInvalidArgument, with one that captures a graph ErrCapturing,
// and while the buffer is published ErrInUse; then nothing has changed.
func (b *Buffer) CloseAfter(streams ...*cuda.Stream) error {
	return b.endAfter("vmm.Buffer.CloseAfter", streams)
}

func (b *Buffer) endAfter(op string, streams []*cuda.Stream) error {
	in := b.inner()
	if in == nil {
		return errNilBuffer(op)
	}
	return life.CloseAfter(&in.closer, in.res.System(),
		func() (*core.Fence, error) { return in.closeAfter(op, streams) },
		func() error {
			if in.pending.Load() > 0 {
				return life.ErrAgain
			}
			return b.teardown(op)
		})
}

// Released returns the completion of the buffer's closing: from then on all its memory
// that no other buffer shares is free.
func (b *Buffer) Released() cuda.Completion {
	return b.b.closer.Completion()
}

func (b *Buffer) teardown(op string) error {
	in := b.b
	in.changes.Lock() // the reclaimer's last job may still be running
	defer in.changes.Unlock()
	in.used.Store(0)
	// Clipped chunks have passed: their jobs kept the buffer until then.
	if err := in.uncommitLocked(op, 0); err != nil {
		return err
	}
	if err := in.res.Close(op); err != nil {
		return err
	}
	in.gone.Store(true)
	in.status.Closed()
	in.Untrack()
	b.watched.Stop()
	return nil
}

// Abandon implements share.Memory.
func (b *buffer) Abandon(op string, cause error) error {
	b.closer.Life.Close()
	b.gone.Store(true)
	b.Untrack()
	return b.discard(op, cause, nil)
}

// wait waits for the devices that have access to the buffer as far as the driver is
// concerned.
func (b *buffer) wait(op string) error {
	return b.res.System().WaitDevices(op, b.res.Devices())
}

// close takes the buffer out of use, unless a publication holds it or a Host function runs.
func (b *buffer) close(op string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.res.Views.None(op, 0, vrange.End); err != nil {
		return err
	}
	b.holds.mu.Lock()
	defer b.holds.mu.Unlock()
	if len(b.holds.all) > 0 {
		return b.holds.all[0].inUse(op)
	}
	b.closer.Life.Close()
	return nil
}

// closeAfter makes the fence for taking the buffer out of use, unless a publication
// holds it. From then on none can.
func (b *buffer) closeAfter(op string, streams []*cuda.Stream) (*core.Fence, error) {
	set := func(closing bool) error {
		b.holds.mu.Lock()
		defer b.holds.mu.Unlock()
		if closing && len(b.holds.all) > 0 {
			return b.holds.all[0].inUse(op)
		}
		b.holds.closing = closing
		return nil
	}
	if err := set(true); err != nil {
		return nil, err
	}
	f, err := core.FenceOf(b.res.System(), op, streams)
	if err != nil {
		_ = set(false)
	}
	return f, err
}
