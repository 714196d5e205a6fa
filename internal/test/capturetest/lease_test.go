package capturetest

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/vmm"
)

// byFD leases are possible on every driver; what a fabric handle is exported
// and imported by is the same call.
var byFD = handles.LeaseOptions{Handle: vmm.PosixFD}

var leaseCases = join(
	plain("Lease", (*world).lease, "Offer", "String", "Released", "Close"),
	plain("Offer", func(w *world) handles.Offer { return w.lease().Offer() }, "String", "LogValue", "MarshalText", "Receipt"),
	plain("Receipt", func(*world) handles.Receipt { return handles.Receipt{} }, "MarshalText"),
	table{
		"Leases": nothing(func() any { return handles.Leases() }),
		"Lease.Format": func(w *world) func() error {
			l := w.lease()
			return func() error { _ = fmt.Sprintf("%v", l); return nil }
		},
		"Offer.UnmarshalText": func(w *world) func() error {
			text := must[[]byte](w)(w.lease().Offer().MarshalText())
			return func() error { return new(handles.Offer).UnmarshalText(text) }
		},
		"Receipt.UnmarshalText": func(w *world) func() error {
			text := must[[]byte](w)(handles.Receipt{}.MarshalText())
			return func() error { return new(handles.Receipt).UnmarshalText(text) }
		},
		"Lease.Imported": func(w *world) func() error {
			l := w.lease()
			return func() error { return l.Imported(l.Offer().Receipt()) }
		},
		"Lease.Wait": func(w *world) func() error {
			o := byFD
			o.Receivers = 1
			l := made[*handles.Lease](w)(handles.LeaseBuffer(w.buffer(), o))
			return func() error { return errors.Join(l.Imported(l.Offer().Receipt()), l.Wait(w.soon())) }
		},
		"LeaseBuffer": func(w *world) func() error {
			b := w.buffer()
			return func() error { return keep[*handles.Lease](w)(handles.LeaseBuffer(b, byFD)) }
		},
		"LeaseArray": func(w *world) func() error {
			a := w.array()
			return func() error { return keep[*handles.Lease](w)(handles.LeaseArray(a, byFD)) }
		},
		"ImportBuffer": func(w *world) func() error {
			l := w.lease()
			return func() error {
				return keep[*vmm.Buffer](w)(handles.ImportBuffer(w.dev, l.Offer(), handles.ImportOptions{}))
			}
		},
		"ImportArray": func(w *world) func() error {
			l := made[*handles.Lease](w)(handles.LeaseArray(w.array(), byFD))
			return func() error {
				return keep[*vmm.Array[int32]](w)(handles.ImportArray[int32](w.dev, l.Offer(), handles.ImportOptions{}))
			}
		},
	},
)

func (w *world) lease() *handles.Lease {
	return made[*handles.Lease](w)(handles.LeaseBuffer(w.buffer(), byFD))
}
