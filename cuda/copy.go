package cuda

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// The copies below are work on the stream: they return at once and run later.
// The addresses are the caller's responsibility, as in the driver; the vmm
// package has forms that check. Only suspended memory is refused, with ErrSuspended. On a
// stream that captures they become part of the graph, whose launches use the same addresses
// and host memory: a function of Graph.OnClose may give those back.

// CopyFromHost copies all of src, pinned host memory, to device memory.
func (s *Stream) CopyFromHost(dst Ptr, src HostSlice) error {
	const op = "cuda.Stream.CopyFromHost"
	return s.withHost(op, src, func() error {
		if err := s.checkNotSuspended(op, dst, src.len); err != nil {
			return err
		}
		return s.copied(op, driver.CallMemcpyHtoDAsync, src.len, "to", dst,
			s.sys().Drv.MemcpyHtoDAsync(s.in.Ctx.Handle, driver.Ptr(dst), src.pointer(), uint64(src.len), s.in.Handle))
	})
}

// CopyToHost fills dst, pinned host memory, from device memory.
func (s *Stream) CopyToHost(dst HostSlice, src Ptr) error {
	const op = "cuda.Stream.CopyToHost"
	return s.withHost(op, dst, func() error {
		if err := s.checkNotSuspended(op, src, dst.len); err != nil {
			return err
		}
		return s.copied(op, driver.CallMemcpyDtoHAsync, dst.len, "from", src,
			s.sys().Drv.MemcpyDtoHAsync(s.in.Ctx.Handle, dst.pointer(), driver.Ptr(src), uint64(dst.len), s.in.Handle))
	})
}

func (s *Stream) withHost(op string, h HostSlice, do func() error) error {
	if err := s.use(op); err != nil {
		return err
	}
	defer s.in.Release()
	if err := h.use(op, s.sys()); err != nil {
		return err
	}
	defer h.buf.closer.Release()
	if h.len == 0 {
		return nil
	}
	return do()
}

// Copy copies n bytes of device memory, which may lie on two devices if the stream's
// device was granted access to both. If the two ranges overlap
// the result is undefined; the software driver reports it.
func (s *Stream) Copy(dst, src Ptr, n int) error {
	const op = "cuda.Stream.Copy"
	if err := s.useBytes(op, n); err != nil {
		return err
	}
	defer s.in.Release()
	if n == 0 {
		return nil
	}
	for _, at := range [...]Ptr{dst, src} {
		if err := s.checkNotSuspended(op, at, n); err != nil {
			return err
		}
	}
	r := s.sys().Drv.MemcpyDtoDAsync(s.in.Ctx.Handle, driver.Ptr(dst), driver.Ptr(src), uint64(n), s.in.Handle)
	if r != driver.Success {
		return s.in.Ctx.CallError(op, driver.CallMemcpyDtoDAsync, r,
			fmt.Sprintf("%s from %v to %v on stream %#x of %v", errs.Bytes(n), src, dst, s.handle(), s.dev))
	}
	return nil
}

// Memset sets n bytes of device memory.
func (s *Stream) Memset(dst Ptr, value byte, n int) error {
	const op = "cuda.Stream.Memset"
	if err := s.useBytes(op, n); err != nil {
		return err
	}
	defer s.in.Release()
	if n == 0 {
		return nil
	}
	if err := s.checkNotSuspended(op, dst, n); err != nil {
		return err
	}
	return s.copied(op, driver.CallMemsetD8Async, n, "at", dst,
		s.sys().Drv.MemsetD8Async(s.in.Ctx.Handle, driver.Ptr(dst), value, uint64(n), s.in.Handle))
}

// Upload copies Go memory to device memory. It goes through pinned memory of
// the stream's own, so it returns when the last byte was staged: src may be
// changed then, while the copy is still work on the stream. It waits while more is
// staged than the stream has taken.
//
// In a capture that WithCapture began, on whichever stream takes part, it never
// waits, and the graph keeps the staged bytes: every launch copies them again.
// In a capture that another library began it returns ErrCapturing, since the life of
// that graph is unknown: copy from a HostBuffer that lives as long.
func (s *Stream) Upload(dst Ptr, src []byte) error { return s.upload(dst, src, nil) }

// staging gives the library's other packages the copies piece by piece.
type staging struct{ s *Stream }

func (p staging) UploadPieces(dst driver.Ptr, src []byte, g core.Guard) error {
	return p.s.upload(Ptr(dst), src, g)
}

func (p staging) DownloadPieces(dst []byte, src driver.Ptr, g core.Guard) error {
	return p.s.download(dst, Ptr(src), g)
}

func (s *Stream) upload(dst Ptr, src []byte, g core.Guard) error {
	const op = "cuda.Stream.Upload"
	if err := s.use(op); err != nil {
		return err
	}
	defer s.in.Release()
	if len(src) == 0 {
		return nil
	}
	if err := s.checkNotSuspended(op, dst, len(src)); err != nil {
		return err
	}
	for {
		capturing, r := s.in.Capturing()
		if r != driver.Success {
			return s.result(op, driver.CallStreamIsCapturing, r)
		}
		if !capturing {
			return s.ring.upload(op, driver.Ptr(dst), src, g)
		}
		c, err := s.capture(op, "capture with Stream.WithCapture, whose graph keeps the bytes, or copy from a HostBuffer that lives as long as the graph")
		if err != nil {
			return err
		}
		if taken, err := c.upload(op, s, driver.Ptr(dst), src, g); taken || err != nil {
			return err
		}
	}
}

// Download copies device memory to Go memory, after the work that is on the
// stream. It returns when the last byte has landed. While the stream captures
// a graph it is ErrCapturing.
func (s *Stream) Download(dst []byte, src Ptr) error { return s.download(dst, src, nil) }

func (s *Stream) download(dst []byte, src Ptr, g core.Guard) error {
	const op = "cuda.Stream.Download"
	if err := s.use(op); err != nil {
		return err
	}
	defer s.in.Release()
	if len(dst) == 0 {
		return nil
	}
	if err := s.checkNotSuspended(op, src, len(dst)); err != nil {
		return err
	}
	if err := s.notCapturing(op); err != nil {
		return err
	}
	return s.ring.download(op, dst, driver.Ptr(src), g)
}

func (s *Stream) useBytes(op string, n int) error {
	if n < 0 {
		return errs.Invalid(op, fmt.Sprintf("%d bytes", n), "lengths are not negative")
	}
	return s.use(op)
}

func (s *Stream) copied(op string, c driver.Call, n int, way string, p Ptr, r driver.Result) error {
	if r == driver.Success {
		return nil
	}
	return s.in.Ctx.CallError(op, c, r, fmt.Sprintf("%s %s %v on stream %#x of %v", errs.Bytes(n), way, p, s.handle(), s.dev))
}

// Transfer returns the device's own stream, which copies use that name none. It
// exists from the first use until the System closes, and can be neither closed nor
// captured. Work on it is ordered with no other stream.
func (d *Device) Transfer() (*Stream, error) {
	const op = "cuda.Device.Transfer"
	if err := d.open(op); err != nil {
		return nil, err
	}
	d.mu.Lock()
	s := d.transfer
	d.mu.Unlock()
	if s != nil {
		return s, nil
	}
	s, err := d.newStream(op, StreamOptions{}, false)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.transfer != nil {
		defer func() { _ = s.close(op) }()
		return d.transfer, nil
	}
	s.own = true
	d.transfer = s
	d.sys.mu.Lock()
	d.sys.transfers = append(d.sys.transfers, s)
	d.sys.mu.Unlock()
	return s, nil
}
