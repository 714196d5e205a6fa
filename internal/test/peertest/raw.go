//go:build linux

package peertest

import (
	"encoding/binary"
	"errors"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// ImportRaw measures the driver calls alone that import chunks of a size, map them side by side and
// grant access. It takes all of it back.
func ImportRaw(d *cuda.Device, fds []*peer.FD, size uint64) (took time.Duration, err error) {
	n := uint64(len(fds))
	shareable := make([]driver.ShareableHandle, n)
	for i, f := range fds {
		if err := f.Use(func(n int) error {
			binary.NativeEndian.PutUint32(shareable[i][:], uint32(n))
			return nil
		}); err != nil {
			return 0, err
		}
	}
	if _, err := d.Context(); err != nil {
		return 0, err
	}
	drv := core.SystemOf(d).Drv
	ok := func(r driver.Result) {
		if r != driver.Success {
			err = errors.Join(err, errors.New(r.String()))
		}
	}
	at, r := drv.MemAddressReserve(n*size, 0, 0)
	ok(r)
	mem := make([]driver.MemHandle, n)
	access := []driver.AccessDesc{{Location: driver.Location{Type: driver.LocationDevice, ID: int32(d.Ordinal())}, Flags: driver.AccessReadWrite}}
	start := time.Now()
	for i, s := range shareable {
		mem[i], r = drv.MemImportFromShareableHandle(s, driver.HandlePosixFD)
		ok(r)
	}
	for i, h := range mem {
		ok(drv.MemMap(at+driver.Ptr(uint64(i)*size), size, 0, h))
	}
	ok(drv.MemSetAccess(at, n*size, access))
	took = time.Since(start)
	ok(drv.MemUnmap(at, n*size))
	for _, h := range mem {
		ok(drv.MemRelease(h))
	}
	ok(drv.MemAddressFree(at, n*size))
	return took, err
}
