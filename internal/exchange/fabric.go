package exchange

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/diagnose"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
)

// TakeFabric imports the next chunks by their fabric handles.
func (i *Importer) TakeFabric(all []cuda.FabricHandle) error {
	sys := core.SystemOf(i.dev)
	for _, f := range all {
		at := len(i.chunks)
		if at >= len(i.declared.Chunks) {
			return errs.Peer(i.op, ErrMismatch, fmt.Sprintf("more fabric handles than %s", errs.Count(at, "chunk")), errs.SameHint)
		}
		h, err := phys.ImportFabric(i.op, sys, driver.ShareableHandle(f), uint64(i.declared.Chunks[at]))
		if err != nil {
			return i.fabricError(err)
		}
		if err := i.keep(h); err != nil {
			return err
		}
	}
	return nil
}

// fabricError adds this process's place in the fabric to a refused import, for comparison
// with the exporter's, and the obstacle if it is known.
func (i *Importer) fabricError(err error) error {
	var d *cuda.Error
	if !errors.As(err, &d) || d.Call != driver.CallMemImportFromShareableHandle.String() {
		return err
	}
	sys := core.SystemOf(i.dev)
	if why := diagnose.Import(sys, driver.Device(i.dev.Ordinal()), driver.Result(d.Code)); why != nil {
		return fmt.Errorf("%w: %w", err, why)
	}
	return err
}
