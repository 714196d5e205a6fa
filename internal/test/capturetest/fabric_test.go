package capturetest

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/fabric"
	"github.com/cuvmm/cuvmm/vmm"
)

var fabricCases = join(
	plain("Diagnosis", func(*world) fabric.Diagnosis {
		return fabric.Diagnosis{Findings: []fabric.Finding{{Check: "nodes"}}}
	}, "String", "Works"),
	plain("Finding", func(*world) fabric.Finding { return fabric.Finding{Check: "nodes"} }, "String"),
	table{
		"Diagnose": func(w *world) func() error {
			return func() error {
				_, err := fabric.Diagnose(fabric.Options{Trial: true}, w.dev)
				return err
			}
		},
		// Where a channel is open, memory is made and given back.
		"Findings": func(w *world) func() error {
			return func() error {
				a, err := vmm.Create(w.dev, 2<<20, vmm.Properties{Handles: vmm.Fabric})
				if err == nil {
					return a.Close()
				}
				if fabric.Findings(err) == nil || !errors.Is(err, cuda.ErrNotPermitted) && !errors.Is(err, cuda.ErrNotSupported) {
					return err
				}
				return nil
			}
		},
	},
)

var fabricHandleCases = join(
	plain("FabricHandle", func(*world) cuda.FabricHandle { return cuda.FabricHandle{1} }, "String", "LogValue", "MarshalBinary", "MarshalText"),
	table{
		"FabricHandle.Format": nothing(func() any { return fmt.Sprintf("%x", cuda.FabricHandle{1}) }),
		"FabricHandle.UnmarshalBinary": func(*world) func() error {
			return func() error { return new(cuda.FabricHandle).UnmarshalBinary(make([]byte, 64)) }
		},
		"FabricHandle.UnmarshalText": func(w *world) func() error {
			text := must[[]byte](w)(cuda.FabricHandle{1}.MarshalText())
			return func() error { return new(cuda.FabricHandle).UnmarshalText(text) }
		},
	},
)
