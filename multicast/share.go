package multicast

import (
	"encoding/binary"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// Export returns a file descriptor of the object, for another process of this host. The
// caller closes it; while it is open the object lives. The other process also needs the
// size and the number of devices.
func (o *Object) Export() (*peer.FD, error) {
	s, err := o.export("multicast.Object.Export", driver.HandlePosixFD)
	if err != nil {
		return nil, err
	}
	return peer.NewFD(int(int32(binary.NativeEndian.Uint32(s[:]))))
}

// ExportFabric returns a fabric handle of the object, for a process anywhere on the fabric.
// The handle keeps nothing alive: close the object only after all have imported it.
func (o *Object) ExportFabric() (cuda.FabricHandle, error) {
	s, err := o.export("multicast.Object.ExportFabric", driver.HandleFabric)
	return cuda.FabricHandle(s), err
}

func (o *Object) export(op string, t driver.HandleTypes) (driver.ShareableHandle, error) {
	if err := o.acquire(op); err != nil {
		return driver.ShareableHandle{}, err
	}
	defer o.closer.Release()
	return o.o.h.ExportMulticast(op, t)
}

// Import imports the object of a descriptor, which the caller still owns. Size and number of
// devices are the exporter's: the driver does not report them. For a descriptor of ordinary
// memory it returns handles.ErrMismatch. The caller closes the object. The same object may
// be imported several times, each with devices of its own.
func Import(s *cuda.System, f *peer.FD, size, devices int) (o *Object, err error) {
	const op = "multicast.Import"
	if f == nil {
		return nil, errs.Invalid(op, "a nil descriptor", "pass what Object.Export made")
	}
	err = f.Use(func(n int) error {
		var from driver.ShareableHandle
		binary.NativeEndian.PutUint32(from[:], uint32(int32(n)))
		o, err = importAs(op, s, from, driver.HandlePosixFD, size, devices)
		return err
	})
	return o, err
}

// ImportFabric is Import with a fabric handle. Its exporter must not have closed the
// object yet.
func ImportFabric(s *cuda.System, f cuda.FabricHandle, size, devices int) (*Object, error) {
	return importAs("multicast.ImportFabric", s, driver.ShareableHandle(f), driver.HandleFabric, size, devices)
}

func importAs(op string, s *cuda.System, from driver.ShareableHandle, t driver.HandleTypes, size, devices int) (*Object, error) {
	if core.SystemOf(s) == nil {
		return nil, errNilSystem(op)
	}
	p := Properties{Devices: devices}
	gran, err := granularity(op, core.SystemOf(s), p)
	if err != nil {
		return nil, err
	}
	if size <= 0 || size > maxBytes || uint64(size)%gran != 0 {
		return nil, errs.Invalid(op, "a size of "+errs.Count(size, "byte"), "pass Object.Size of the exporter's object")
	}
	h, err := phys.ImportMulticast(op, core.SystemOf(s), from, t, uint64(size))
	if err != nil {
		return nil, err
	}
	if h.IsMemory() {
		err := errs.Peer(op, handles.ErrMismatch, "a handle of ordinary memory, where one of a multicast object is imported", "pass what Object.Export or ExportFabric made")
		return nil, phys.Abandon(op, err, h)
	}
	return newObject(h, p, gran), nil
}
