package core

import "github.com/cuvmm/cuvmm/internal/driver"

// SystemHolder, StreamHolder and the like are embedded, unexported, by the
// public objects. Their only method is unexported too, so nobody outside can
// reach the inner state or stand in for an object.

// SystemHolder is embedded by cuda.System.
type SystemHolder struct{ s *System }

// HoldSystem makes the holder.
func HoldSystem(s *System) SystemHolder { return SystemHolder{s} }

func (h *SystemHolder) system() *System { return h.s }

// SystemOf looks inside a cuda.System.
func SystemOf(h interface{ system() *System }) *System { return h.system() }

// ContextHolder is embedded by cuda.Device. Its context is made when first
// asked for.
type ContextHolder struct {
	get func() (*Context, error)
	sys *System
}

// HoldContext makes the holder.
func HoldContext(s *System, get func() (*Context, error)) ContextHolder {
	return ContextHolder{get, s}
}

func (h *ContextHolder) context() (*Context, error) { return h.get() }
func (h *ContextHolder) system() *System            { return h.sys }

// ContextOf looks inside a cuda.Device: the context that it uses.
func ContextOf(h interface{ context() (*Context, error) }) (*Context, error) { return h.context() }

// StreamHolder is embedded by cuda.Stream.
type StreamHolder struct{ s *Stream }

// HoldStream makes the holder.
func HoldStream(s *Stream) StreamHolder { return StreamHolder{s} }

func (h *StreamHolder) stream() *Stream { return h.s }

// StreamOf looks inside a cuda.Stream.
func StreamOf(h interface{ stream() *Stream }) *Stream { return h.stream() }

// Guard lets the pieces of a staged copy onto the stream, one by one: each is
// submitted between Enter and Leave, and whatever may wait lies outside. An
// error of Enter ends the copy, and Leave is not called then. A nil Guard lets
// everything on.
type Guard interface {
	Enter() error
	Leave()
}

var (
	upload   func(stream any, dst driver.Ptr, src []byte, g Guard) error
	download func(stream any, dst []byte, src driver.Ptr, g Guard) error
)

// SetStaging tells the package how a *cuda.Stream copies from and to Go memory.
// cuda calls it once.
func SetStaging(
	up func(stream any, dst driver.Ptr, src []byte, g Guard) error,
	down func(stream any, dst []byte, src driver.Ptr, g Guard) error,
) {
	upload, download = up, down
}

// Upload is cuda.Stream.Upload, piece by piece.
func Upload(stream any, dst driver.Ptr, src []byte, g Guard) error {
	return upload(stream, dst, src, g)
}

// Download is cuda.Stream.Download, piece by piece.
func Download(stream any, dst []byte, src driver.Ptr, g Guard) error {
	return download(stream, dst, src, g)
}

var unused func(buffer any) error

// SetUnused tells the package how a *cuda.HostBuffer is closed without waiting.
// cuda calls it once.
func SetUnused(f func(buffer any) error) { unused = f }

// CloseUnused closes a *cuda.HostBuffer at once: the caller knows that no work
// uses it.
func CloseUnused(buffer any) error { return unused(buffer) }

// openSystem is set by cuda.
var openSystem func(d driver.Driver, closed func() error, options any) (any, error)

// SetOpen tells the package how a *cuda.System is made round a driver. cuda
// calls it once.
func SetOpen(f func(d driver.Driver, closed func() error, options any) (any, error)) { openSystem = f }

// OpenDriver makes a *cuda.System round a driver that cuda does not know.
// The options are a []cuda.Option; closed is called when the System closes.
func OpenDriver(d driver.Driver, closed func() error, options any) (any, error) {
	return openSystem(d, closed, options)
}
