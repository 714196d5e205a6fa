package capturetest

import (
	"errors"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

var multicastCases = join(
	plain("Object", (*world).multicast, "Size", "Properties", "String", "Released", "Close"),
	plain("Binding", (*world).binding, "Device", "Offset", "Size", "Released", "Close"),
	plain("Team", (*world).team, "Ptr", "AbortWord", "Abort", "Devices", "Size", "Members", "First", "String", "Released", "Close"),
	plain("TeamError", func(w *world) *multicast.TeamError { return new(multicast.TeamError) }, "Error", "Unwrap"),
	table{
		"NewTeam": func(w *world) func() error {
			w.softwareOnly()
			g := w.group()
			return func() error {
				return keep[*multicast.Team](w)(multicast.NewTeam(w.Context(), g, []*cuda.Device{w.dev}, 2*mib, multicast.TeamOptions{}))
			}
		},
		"Team.Replica": func(w *world) func() error {
			t := w.team()
			return func() error { t.Replica(0); return nil }
		},
		"Team.Leave": func(w *world) func() error {
			t := w.team()
			return func() error { return t.Leave(w.Context()) }
		},
		"Supported": func(w *world) func() error {
			return func() error {
				if err := multicast.Supported(w.dev); !errors.Is(err, cuda.ErrNotSupported) {
					return err
				}
				return nil
			}
		},
		"Granularity": func(w *world) func() error {
			return func() error {
				_, err := multicast.Granularity(w.dev.System(), multicast.Properties{Devices: 1})
				if errors.Is(err, cuda.ErrNotSupported) {
					return nil
				}
				return err
			}
		},
		"Create": func(w *world) func() error {
			w.softwareOnly()
			return func() error { return keep[*multicast.Object](w)(w.newMulticast()) }
		},
		"Import": func(w *world) func() error {
			f := made[*peer.FD](w)(w.multicast().Export())
			return func() error {
				return keep[*multicast.Object](w)(multicast.Import(w.dev.System(), f, 2*mib, 1))
			}
		},
		"ImportFabric": func(w *world) func() error {
			w.softwareOnly()
			return func() error {
				if _, err := multicast.ImportFabric(w.dev.System(), cuda.FabricHandle{1}, 2*mib, 1); err == nil {
					return errors.New("a handle of nothing was imported")
				}
				return nil
			}
		},
		"Object.AddDevice": func(w *world) func() error {
			w.softwareOnly()
			o := made[*multicast.Object](w)(w.newMulticast())
			return func() error { return o.AddDevice(w.dev) }
		},
		"Object.Export": func(w *world) func() error {
			o := w.multicast()
			return func() error { return keep[*peer.FD](w)(o.Export()) }
		},
		"Object.ExportFabric": func(w *world) func() error {
			o := w.multicast()
			return func() error {
				if _, err := o.ExportFabric(); !errors.Is(err, cuda.ErrNotSupported) {
					return err
				}
				return nil
			}
		},
		"Object.Bind": func(w *world) func() error {
			o, a := w.multicast(), w.allocation()
			return func() error { return keep[*multicast.Binding](w)(o.Bind(w.dev, 0, a, 0, 2*mib)) }
		},
		"Object.BindMapping": func(w *world) func() error {
			o, m := w.multicast(), w.mapping(w.reservation())
			return func() error { return keep[*multicast.Binding](w)(o.BindMapping(w.dev, 0, m, 0, 2*mib)) }
		},
		"Binding.CloseAfter": func(w *world) func() error {
			b, s := w.binding(), w.stream()
			return func() error { return b.CloseAfter(s) }
		},
	},
)

// softwareOnly: multicast objects are never made on a real driver.
func (w *world) softwareOnly() {
	if !w.dev.System().Driver().Software {
		w.Skip("multicast objects are made on the software driver only")
	}
}

func (w *world) newMulticast() (*multicast.Object, error) {
	return multicast.Create(w.dev.System(), 2*mib, multicast.Properties{Devices: 1, Handles: vmm.PosixFD})
}

// multicast is an object that is ready for use.
func (w *world) multicast() *multicast.Object {
	w.softwareOnly()
	o := made[*multicast.Object](w)(w.newMulticast())
	require.NoError(w, o.AddDevice(w.dev))
	return o
}

func (w *world) binding() *multicast.Binding {
	return made[*multicast.Binding](w)(w.multicast().Bind(w.dev, 0, w.allocation(), 0, 2*mib))
}

func (w *world) group() *rendezvous.Group {
	g := must[[]*rendezvous.Group](w)(rendezvous.InProcess(1, rendezvous.Options{}))
	w.closed(g[0])
	return g[0]
}

func (w *world) team() *multicast.Team {
	w.softwareOnly()
	return made[*multicast.Team](w)(multicast.NewTeam(w.Context(), w.group(), []*cuda.Device{w.dev}, 2*mib, multicast.TeamOptions{}))
}
