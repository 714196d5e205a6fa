package core

import (
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// SystemHolder, StreamHolder and the like are embedded, unexported, by the public
// objects. Their methods are unexported too, so other modules can neither reach the
// inner state nor implement an object.

// SystemHolder is embedded by cuda.System.
type SystemHolder struct{ s *System }

// NewSystemHolder makes the holder.
func NewSystemHolder(s *System) SystemHolder { return SystemHolder{s} }

func (h *SystemHolder) system() *System { return h.s }

// SystemOf looks inside a cuda.System or a cuda.Device. It returns nil for one that is
// nil or that no function made.
func SystemOf[H interface {
	comparable
	system() *System
}](h H) *System {
	var none H
	if h == none {
		return nil
	}
	return h.system()
}

// ContextHolder is embedded by cuda.Device. Its context is made on first use.
type ContextHolder struct {
	get func(op string) (*Context, error)
	sys *System
}

// NewContextHolder makes the holder.
func NewContextHolder(s *System, get func(op string) (*Context, error)) ContextHolder {
	return ContextHolder{get, s}
}

func (h *ContextHolder) context(op string) (*Context, error) {
	if h.get == nil {
		return nil, errs.NilDevice(op)
	}
	return h.get(op)
}

func (h *ContextHolder) system() *System { return h.sys }

// ContextOf looks inside a cuda.Device: it returns the context that the device uses.
func ContextOf[H interface {
	comparable
	context(op string) (*Context, error)
}](op string, h H) (*Context, error) {
	var none H
	if h == none {
		return nil, errs.NilDevice(op)
	}
	return h.context(op)
}

// StreamHolder is embedded by cuda.Stream.
type StreamHolder struct {
	s       *Stream
	staging Staging
}

// NewStreamHolder makes the holder.
func NewStreamHolder(s *Stream, staging Staging) StreamHolder { return StreamHolder{s, staging} }

func (h *StreamHolder) stream() *Stream { return h.s }
func (h *StreamHolder) stages() Staging { return h.staging }

// StreamOf looks inside a cuda.Stream. It returns nil, which Use and Look refuse, for one
// that is nil or that no function made.
func StreamOf[H interface {
	comparable
	stream() *Stream
}](h H) *Stream {
	var none H
	if h == none {
		return nil
	}
	return h.stream()
}

// Staging copies from and to Go memory in stream order, through pinned memory.
type Staging interface {
	UploadPieces(dst driver.Ptr, src []byte, g Guard) error
	DownloadPieces(dst []byte, src driver.Ptr, g Guard) error
}

// Guard admits the pieces of a staged copy to the stream, one by one: each is submitted
// between Enter and Leave, and everything that may wait happens outside. An error of
// Enter ends the copy, and Leave is not called then. A nil Guard admits everything.
type Guard interface {
	Enter() error
	Leave()
}

// StagingOf returns the staged copies of a cuda.Stream.
func StagingOf(h interface{ stages() Staging }) Staging { return h.stages() }

// HostBufferHolder is embedded by cuda.HostBuffer.
type HostBufferHolder struct{ close func() error }

// NewHostBufferHolder makes the holder; closeUnused closes the buffer without
// waiting.
func NewHostBufferHolder(closeUnused func() error) HostBufferHolder {
	return HostBufferHolder{closeUnused}
}

func (h *HostBufferHolder) closeUnused() error { return h.close() }

// CloseUnused closes a cuda.HostBuffer without waiting: the caller knows that no work
// uses it.
func CloseUnused(h interface{ closeUnused() error }) error { return h.closeUnused() }

// DriverHolder is embedded by cuda.Options: a driver to open in place of the real
// one.
type DriverHolder struct {
	drv    driver.Driver
	closed func() error
}

func (h *DriverHolder) held() *DriverHolder { return h }

// UseDriver makes cuda.Open open a driver that cuda does not know. closed is called
// when the System closes; it may be nil.
func UseDriver(o interface{ held() *DriverHolder }, d driver.Driver, closed func() error) {
	*o.held() = DriverHolder{d, closed}
}

// DriverOf returns what UseDriver set, or nil.
func DriverOf(h *DriverHolder) (d driver.Driver, closed func() error) { return h.drv, h.closed }
