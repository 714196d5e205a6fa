package capturetest

import (
	"bytes"
	"io"

	"github.com/cuvmm/cuvmm/inspect"
)

func (w *world) snapshot() inspect.Snapshot {
	w.watchedPool()
	return must[inspect.Snapshot](w)(inspect.Take(w.dev.System()))
}

var inspectCases = join(
	plain("Address", func(*world) inspect.Address { return 1 << 40 }, "String", "MarshalText"),
	plain("Stack", func(*world) inspect.Stack { return inspect.Stack{"main.main (main.go:1)"} }, "String"),
	table{
		"Address.UnmarshalText": func(*world) func() error {
			return func() error { return new(inspect.Address).UnmarshalText([]byte("0x10")) }
		},
		"Take": func(w *world) func() error {
			w.snapshot()
			return func() error { _, err := inspect.Take(w.dev.System()); return err }
		},
		"Summarize": func(w *world) func() error {
			w.snapshot()
			return func() error { _, err := inspect.Summarize(w.dev.System()); return err }
		},
		"Compare": func(w *world) func() error {
			s := w.snapshot()
			return func() error { inspect.Compare(s, s); return nil }
		},
		"Frame": nothing(func() any { f, _, _ := inspect.Frame("f (x.go:1)"); return f }),
		"Snapshot.Holder": func(w *world) func() error {
			s := w.snapshot()
			return func() error { s.Holder(s.Reservations[0]); return nil }
		},
		"Snapshot.Uses": func(w *world) func() error {
			s := w.snapshot()
			return func() error { s.Uses(); return nil }
		},
		"Snapshot.Write": func(w *world) func() error {
			s := w.snapshot()
			return func() error { return s.Write(io.Discard) }
		},
		"Read": func(w *world) func() error {
			var text bytes.Buffer
			if err := w.snapshot().Write(&text); err != nil {
				w.Fatal(err)
			}
			return func() error { _, err := inspect.Read(&text); return err }
		},
		"ReadSummary": func(w *world) func() error {
			var text bytes.Buffer
			if err := w.snapshot().Write(&text); err != nil {
				w.Fatal(err)
			}
			return func() error { _, err := inspect.ReadSummary(&text); return err }
		},
	},
)
