package capturetest

import (
	"context"
	"errors"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
)

var autoCases = table{
	"Open": func(w *world) func() error {
		return func() error { return keep[*cuda.System](w)(auto.Open(auto.Options{Driver: auto.Software})) }
	},
}

var cudaCases = join(
	plain("CaptureMode", func(*world) cuda.CaptureMode { return cuda.CaptureGlobal }, "String"),
	plain("Code", func(*world) cuda.Code { return 2 }, "String"),
	plain("DriverInfo", func(w *world) cuda.DriverInfo { return w.dev.System().Driver() }, "String"),
	plain("Location", func(*world) cuda.Location { return cuda.OnHost() }, "String"),
	plain("LocationType", func(*world) cuda.LocationType { return cuda.LocationHost }, "String"),
	plain("Ptr", func(*world) cuda.Ptr { return 1 }, "String"),
	plain("UUID", func(w *world) cuda.UUID { return w.dev.UUID() }, "String"),
	table{
		"Error.Error":   func(w *world) func() error { return failing(w, func(e *cuda.Error) { _ = e.Error() }) },
		"Error.Unwrap":  func(w *world) func() error { return failing(w, func(e *cuda.Error) { _ = e.Unwrap() }) },
		"OnDevice":      nothing(func() any { return cuda.OnDevice(0) }),
		"OnHost":        nothing(func() any { return cuda.OnHost() }),
		"OnCurrentNUMA": nothing(func() any { return cuda.OnCurrentNUMA() }),
		"OnHostNUMA":    nothing(func() any { return cuda.OnHostNUMA(0) }),
		"Threads":       nothing(func() any { return cuda.Threads(1) }),
	},
	systemCases, deviceCases, streamCases, eventCases, graphCases, hostCases, kernelCases, fabricHandleCases,
)

// failing is a call on an error of the driver's.
func failing(w *world, use func(e *cuda.Error)) func() error {
	return func() error {
		_, err := w.dev.Attribute(-1)
		var e *cuda.Error
		if !errors.As(err, &e) {
			return errors.New("there is no device attribute -1")
		}
		use(e)
		return nil
	}
}

var systemCases = join(
	plain("System", func(w *world) *cuda.System { return w.dev.System() }, "Driver", "Devices", "Stats", "Live", "Leftovers"),
	table{
		"Open": func(w *world) func() error {
			return func() error {
				s, err := cuda.Open(cuda.Options{})
				if errors.Is(err, cuda.ErrNoDriver) {
					return nil
				}
				return keep[*cuda.System](w)(s, err)
			}
		},
		"System.Device": func(w *world) func() error {
			return func() error { _, err := w.dev.System().Device(0); return err }
		},
		"System.Drain": func(w *world) func() error {
			s, b := w.stream(), w.buffer()
			return func() error { return errors.Join(b.CloseAfter(s), w.dev.System().Drain(context.Background())) }
		},
		"System.TrimHost": func(w *world) func() error {
			if err := w.host(100_000).Close(); err != nil {
				w.Fatal(err)
			}
			return func() error {
				if w.dev.System().TrimHost() == 0 {
					return errors.New("nothing was trimmed")
				}
				return nil
			}
		},
		"System.Close": func(w *world) func() error {
			d := w.another()
			h := must[*cuda.HostBuffer](w)(d.NewHostBuffer(4096))
			s := must[*cuda.Stream](w)(d.Transfer())
			if err := errors.Join(h.CloseAfter(s), s.Synchronize(), d.System().Drain(context.Background())); err != nil {
				w.Fatal(err)
			}
			return d.System().Close
		},
	},
)

var deviceCases = join(
	plain("Device", func(w *world) *cuda.Device { return w.dev },
		"String", "System", "Ordinal", "Name", "UUID", "TotalMemory", "Location", "MemoryInfo", "Capabilities"),
	plain("Device", func(w *world) *cuda.Device { return w.another() }, "Context", "Probe", "Transfer"),
	table{
		"Device.Attribute": func(w *world) func() error {
			return func() error { _, err := w.dev.Attribute(75); return err }
		},
		"Device.CanAccess": func(w *world) func() error {
			return func() error { _, err := w.dev.CanAccess(w.dev); return err }
		},
		"Device.WithContext": func(w *world) func() error {
			handle := must[uintptr](w)(w.dev.Context())
			d := w.another()
			return func() error { _, err := d.WithContext(handle); return err }
		},
		"Device.NewStream": func(w *world) func() error {
			return func() error {
				return errors.Join(keep[*cuda.Stream](w)(w.dev.NewStream(cuda.StreamOptions{})),
					keep[*cuda.Stream](w)(w.dev.NewStream(cuda.StreamOptions{Blocking: true})),
					keep[*cuda.Stream](w)(w.dev.NewStream(cuda.StreamOptions{Priority: -1})))
			}
		},
		"Device.StreamPriorities": func(w *world) func() error {
			return func() error { _, _, err := w.dev.StreamPriorities(); return err }
		},
		"Device.BorrowStream": func(w *world) func() error {
			s := w.stream()
			return func() error {
				legacy, err := w.dev.BorrowStream(0)
				if err != nil {
					return err
				}
				w.closed(legacy) // once no stream captures: its Close is refused while a blocking stream does
				return keep[*cuda.Stream](w)(w.dev.BorrowStream(s.Handle()))
			}
		},
		"Device.NewEvent": func(w *world) func() error {
			return func() error { return keep[*cuda.Event](w)(w.dev.NewEvent(cuda.EventOptions{})) }
		},
		"Device.NewHostBuffer": func(w *world) func() error {
			d := w.another() // whose pool is empty
			return func() error { return keep[*cuda.HostBuffer](w)(d.NewHostBuffer(100)) }
		},
		"Device.LoadModule": func(w *world) func() error {
			return func() error { return keep[*cuda.Module](w)(w.dev.LoadModule([]byte(emptyText))) }
		},
	},
)

var streamCases = join(
	plain("Stream", (*world).stream, "Handle", "Device", "Capturing", "Released"),
	plain("Stream", (*world).busy, "Synchronize", "Done", "Close"),
	table{
		"Stream.Callback": func(w *world) func() error {
			s := w.busy()
			return func() error { return errors.Join(s.Callback(func(error) {}), w.drain()) }
		},
		"Stream.Priority": func(w *world) func() error {
			s := w.stream()
			return func() error { _, err := s.Priority(); return err }
		},
		"Stream.Wait": func(w *world) func() error {
			s, e := w.stream(), w.recorded(w.stream())
			return func() error { return s.Wait(e) }
		},
		"Stream.WithCapture": func(w *world) func() error {
			s, p := w.stream(), w.memory(4096)
			return func() error {
				for _, mode := range []cuda.CaptureMode{cuda.CaptureThreadLocal, cuda.CaptureGlobal, cuda.CaptureRelaxed} {
					err := keep[*cuda.Graph](w)(s.WithCapture(cuda.CaptureOptions{Mode: mode}, func() error {
						return errors.Join(s.Upload(p, make([]byte, 4096)), s.Memset(p, 1, 64))
					}))
					if err != nil {
						return err
					}
				}
				return nil
			}
		},
		"Stream.CopyFromHost": func(w *world) func() error {
			s, h, p := w.stream(), w.host(4096), w.memory(4096)
			return func() error { return s.CopyFromHost(p, h.All()) }
		},
		"Stream.CopyToHost": func(w *world) func() error {
			s, h, p := w.stream(), w.host(4096), w.memory(4096)
			return func() error { return s.CopyToHost(h.All(), p) }
		},
		"Stream.Copy": func(w *world) func() error {
			s, p := w.stream(), w.memory(4096)
			return func() error { return s.Copy(p, p+2048, 2048) }
		},
		"Stream.Memset": func(w *world) func() error {
			s, p := w.stream(), w.memory(4096)
			return func() error { return s.Memset(p, 1, 4096) }
		},
		// More than is staged at a time, so that it waits too.
		"Stream.Upload": func(w *world) func() error {
			s, p := w.stream(), w.memory(20*mib)
			return func() error { return s.Upload(p, make([]byte, 20*mib)) }
		},
		"Stream.Download": func(w *world) func() error {
			s, p := w.stream(), w.memory(20*mib)
			return func() error { return s.Download(make([]byte, 20*mib), p) }
		},
	},
)

// busy is a stream that has staged something.
func (w *world) busy() *cuda.Stream {
	s := w.stream()
	if err := s.Upload(w.memory(64), make([]byte, 64)); err != nil {
		w.Fatal(err)
	}
	return s
}

var eventCases = join(
	plain("Event", func(w *world) *cuda.Event { return w.recorded(w.stream()) }, "Done", "Synchronize", "Released", "Close"),
	table{
		"Event.Record": func(w *world) func() error {
			s, e := w.stream(), w.event()
			return func() error { return e.Record(s) }
		},
		"Event.Since": func(w *world) func() error {
			s := w.stream()
			from, to := w.recorded(s), w.recorded(s)
			if err := s.Synchronize(); err != nil {
				w.Fatal(err)
			}
			return func() error { _, err := to.Since(from); return err }
		},
	},
)

var graphCases = table{
	"Graph.Launch": func(w *world) func() error {
		s, g := w.stream(), w.graph()
		return func() error { return g.Launch(s) }
	},
	"Graph.Released": func(w *world) func() error {
		g := w.graph()
		return func() error { _ = g.Released(); return nil }
	},
	"Graph.OnClose": func(w *world) func() error {
		g := w.graph()
		return func() error { return g.OnClose(func() {}) }
	},
	"Graph.Close": func(w *world) func() error {
		s, g := w.stream(), w.graph()
		return func() error { return errors.Join(g.Launch(s), g.Close()) }
	},
	"Graph.CloseAfter": func(w *world) func() error {
		s, g := w.stream(), w.graph()
		return func() error { return errors.Join(g.Launch(s), g.CloseAfter(s), w.drain()) }
	},
}

// drain has the reclaimer do what a CloseAfter left to it.
func (w *world) drain() error { return w.dev.System().Drain(context.Background()) }

var hostCases = join(
	plain("HostBuffer", func(w *world) *cuda.HostBuffer { return w.host(100) }, "Ptr", "Bytes", "Len", "All", "Released", "Close"),
	plain("HostSlice", func(w *world) cuda.HostSlice { return w.host(100).All() }, "Bytes", "Len"),
	table{
		"HostBuffer.Slice": func(w *world) func() error {
			h := w.host(100)
			return func() error { _, err := h.Slice(1, 3); return err }
		},
		"HostBuffer.CloseAfter": func(w *world) func() error {
			h, s := w.host(100), w.stream()
			return func() error { return errors.Join(h.CloseAfter(s), w.drain()) }
		},
	},
)

var kernelCases = join(
	plain("Module", (*world).module, "Device", "Released", "Close"),
	plain("Kernel", (*world).kernel, "Name", "Module"),
	table{
		"Module.Kernel": func(w *world) func() error {
			m := w.module()
			return func() error { _, err := m.Kernel(emptyKernel); return err }
		},
		"Module.Global": func(w *world) func() error {
			m := w.module()
			return func() error { _, _, err := m.Global(emptyVariable); return err }
		},
		"Module.CloseAfter": func(w *world) func() error {
			m, s := w.module(), w.stream()
			return func() error { return errors.Join(m.CloseAfter(s), w.drain()) }
		},
		"Kernel.Launch": func(w *world) func() error {
			k, s := w.kernel(), w.stream()
			return func() error {
				large := cuda.Launch{Grid: [3]int{1, 1, 1}, Block: [3]int{1, 1, 1}, SharedBytes: 64 << 10, Cooperative: true}
				return errors.Join(k.Launch(s, cuda.Threads(1)), k.Launch(s, large))
			}
		},
		"Kernel.MaxShared": func(w *world) func() error {
			k := w.kernel()
			return func() error { _, err := k.MaxShared(); return err }
		},
		"Kernel.BlocksAtOnce": func(w *world) func() error {
			k := w.kernel()
			return func() error { _, err := k.BlocksAtOnce(cuda.Threads(1)); return err }
		},
	},
)
