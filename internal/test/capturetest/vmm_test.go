package capturetest

import (
	"bytes"
	"errors"
	"io"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
)

var vmmCases = join(
	plain("AccessMode", func(*world) vmm.AccessMode { return vmm.ReadOnly }, "String"),
	plain("Access", func(w *world) vmm.Access { return w.access(vmm.ReadOnly) }, "String"),
	plain("ChunkPlan", func(*world) vmm.ChunkPlan { return vmm.FixedChunks(mib) }, "String"),
	plain("HandleTypes", func(*world) vmm.HandleTypes { return vmm.PosixFD }, "String"),
	plain("RDMA", func(*world) vmm.RDMA { return vmm.RDMAOff }, "String"),
	plain("Usage", func(*world) vmm.Usage { return vmm.TilePool }, "String"),
	plain("Granularity", func(*world) vmm.Granularity { return vmm.RecommendedGranularity }, "String"),
	table{
		"FixedChunks":     nothing(func() any { return vmm.FixedChunks(mib) }),
		"GeometricChunks": nothing(func() any { return vmm.GeometricChunks(0, mib) }),
		"GranularityOf": func(w *world) func() error {
			d := w.another() // which has not been asked before
			return func() error { _, err := vmm.GranularityOf(d, vmm.Properties{}); return err }
		},
	},
	physicalCases, bufferCases, arrayCases, sliceCases, ioCases,
)

var physicalCases = join(
	plain("Allocation", (*world).allocation, "Size", "Requested", "Granted", "Close"),
	plain("Reservation", (*world).reservation, "Ptr", "Size", "Released", "Close"),
	plain("Mapping", func(w *world) *vmm.Mapping { return w.mapping(w.reservation()) }, "Ptr", "Size", "Released", "Close"),
	table{
		"Create": func(w *world) func() error {
			return func() error { return keep[*vmm.Allocation](w)(vmm.Create(w.dev, 2*mib, vmm.Properties{})) }
		},
		"Reserve": func(w *world) func() error {
			return func() error {
				return keep[*vmm.Reservation](w)(vmm.Reserve(w.dev, 2*mib, vmm.ReserveOptions{}))
			}
		},
		"Reservation.Map": func(w *world) func() error {
			r, a := w.reservation(), w.allocation()
			return func() error { return keep[*vmm.Mapping](w)(r.Map(0, a)) }
		},
		"Reservation.MapRun": func(w *world) func() error {
			r, a, b := w.reservation(), w.allocation(), w.allocation()
			return func() error {
				made, err := r.MapRun(0, []vmm.Access{w.access(vmm.ReadWrite)}, a, b)
				for _, m := range made {
					err = errors.Join(err, keep[*vmm.Mapping](w)(m, nil))
				}
				return err
			}
		},
		// Taking access away waits for the device.
		"Reservation.SetAccess": func(w *world) func() error {
			r := w.reservation()
			w.mapping(r)
			return func() error { return r.SetAccess(0, 2*mib, w.access(vmm.ReadOnly)) }
		},
		"Mapping.SetAccess": func(w *world) func() error {
			m := w.mapping(w.reservation())
			return func() error { return m.SetAccess(w.access(vmm.NoAccess)) }
		},
		"Mapping.Access": func(w *world) func() error {
			m := w.mapping(w.reservation())
			return func() error { _, err := m.Access(w.dev.Location()); return err }
		},
		"Reservation.DMABuf": func(w *world) func() error {
			r := w.reservation()
			w.mapping(r)
			return func() error {
				f, err := r.DMABuf(w.dev, 0, 2*mib)
				if err != nil {
					return err
				}
				return f.Close()
			}
		},
		"Buffer.DMABuf": func(w *world) func() error {
			b := w.buffer()
			return func() error {
				f, err := b.DMABuf(0, 2*mib)
				if err != nil {
					return err
				}
				return f.Close()
			}
		},
		"Mapping.Host": func(w *world) func() error {
			node := cuda.OnHostNUMA(0)
			a := made[*vmm.Allocation](w)(vmm.Create(w.dev, 2*mib, vmm.Properties{Location: node}))
			m := made[*vmm.Mapping](w)(w.reservation().Map(0, a))
			if err := m.SetAccess(vmm.Access{Location: node, Mode: vmm.ReadWrite}); err != nil {
				w.Fatal(err)
			}
			return func() error { return m.Host(touch[byte]) }
		},
		"Reservation.CloseAfter": func(w *world) func() error {
			r, other, s := w.reservation(), w.reservation(), w.stream()
			m, n := w.mapping(r), w.mapping(other)
			return func() error {
				return errors.Join(m.CloseAfter(s), r.CloseAfter(s), n.CloseAfter(s), other.Close(), w.drain())
			}
		},
		"Mapping.CloseAfter": func(w *world) func() error {
			m, s := w.mapping(w.reservation()), w.stream()
			return func() error { return errors.Join(m.CloseAfter(s), w.drain()) }
		},
	},
)

var bufferCases = join(
	plain("Buffer", (*world).buffer, "Ptr", "Len", "Device", "Stats", "Requested", "Granted", "Clip", "Released", "Close"),
	table{
		"NewBuffer": func(w *world) func() error {
			return func() error { return keep[*vmm.Buffer](w)(vmm.NewBuffer(w.dev, vmm.BufferOptions{})) }
		},
		"Buffer.Move": func(w *world) func() error {
			b := w.buffer()
			return func() error { return keep[*vmm.Buffer](w)(b.Move(vmm.MoveOptions{Reserve: 128 * mib})) }
		},
		"Buffer.Fork": func(w *world) func() error {
			b, s := w.buffer(), w.stream()
			return func() error {
				return errors.Join(keep[*vmm.Buffer](w)(b.Fork(s, 1000, vmm.ForkOptions{})), keep[*vmm.Buffer](w)(b.Fork(nil, 1000, vmm.ForkOptions{})))
			}
		},
		"Buffer.Append": func(w *world) func() error {
			b, s := w.buffer(), w.stream()
			return func() error {
				return errors.Join(gputest.Err(b.Append(s, make([]byte, 3*mib))), gputest.Err(b.Append(nil, make([]byte, 3*mib))))
			}
		},
		"Buffer.AppendHost": func(w *world) func() error {
			b, s, h := w.buffer(), w.stream(), w.host(3*mib)
			return func() error {
				return errors.Join(gputest.Err(b.AppendHost(s, h.All())), gputest.Err(b.AppendHost(nil, h.All())))
			}
		},
		"Buffer.AppendSlice": func(w *world) func() error {
			b, s := w.buffer(), w.stream()
			part := must[vmm.Slice[byte]](w)(b.Slice(0, 100))
			return func() error {
				return errors.Join(gputest.Err(b.AppendSlice(s, part)), gputest.Err(b.AppendSlice(nil, part)))
			}
		},
		"Buffer.AppendPtr": func(w *world) func() error {
			b, s := w.buffer(), w.stream()
			return func() error {
				return errors.Join(gputest.Err(b.AppendPtr(s, b.Ptr(), 100)), gputest.Err(b.AppendPtr(nil, b.Ptr(), 100)))
			}
		},
		"Buffer.Grow": func(w *world) func() error {
			b := w.buffer()
			return func() error { return b.Grow(10 * mib) }
		},
		"Buffer.AppendUndefined": func(w *world) func() error {
			b := w.buffer()
			return func() error { _, err := b.AppendUndefined(10 * mib); return err }
		},
		"Buffer.Resize": func(w *world) func() error {
			b, s := w.buffer(), w.stream()
			return func() error { return errors.Join(b.Resize(s, 9*mib), b.Resize(nil, 12*mib), b.Resize(nil, 1)) }
		},
		"Buffer.Slice": func(w *world) func() error {
			b := w.buffer()
			return func() error { _, err := b.Slice(0, 10); return err }
		},
		"Buffer.SetAccess": func(w *world) func() error {
			b := w.buffer()
			return func() error { return b.SetAccess(w.access(vmm.ReadOnly)) }
		},
		"Buffer.ClipAfter": func(w *world) func() error {
			b, s := w.buffer(), w.stream()
			return func() error { return errors.Join(b.ClipAfter(s), w.drain()) }
		},
		"Buffer.CloseAfter": func(w *world) func() error {
			b, s := w.buffer(), w.stream()
			return func() error { return errors.Join(b.CloseAfter(s), w.drain()) }
		},
	},
)

var arrayCases = join(
	plain("Array", (*world).array, "Buffer", "Ptr", "Len", "Cap", "All", "Device", "Stats", "Granted", "Clip", "Released", "Close"),
	table{
		"NewArray": func(w *world) func() error {
			return func() error { return keep[*vmm.Array[int32]](w)(vmm.NewArray[int32](w.dev, vmm.BufferOptions{})) }
		},
		"ArrayOf": func(w *world) func() error {
			b := w.buffer()
			return func() error { _, err := vmm.ArrayOf[int32](b); return err }
		},
		"Array.Append": func(w *world) func() error {
			a, s := w.array(), w.stream()
			return func() error {
				return errors.Join(gputest.Err(a.Append(s, make([]int32, mib))), gputest.Err(a.Append(nil, make([]int32, mib))))
			}
		},
		"Array.AppendHost": func(w *world) func() error {
			a, s, h := w.array(), w.stream(), w.host(4096)
			return func() error {
				return errors.Join(gputest.Err(a.AppendHost(s, h.All())), gputest.Err(a.AppendHost(nil, h.All())))
			}
		},
		"Array.AppendSlice": func(w *world) func() error {
			a, s, from := w.array(), w.stream(), w.slice()
			return func() error {
				return errors.Join(gputest.Err(a.AppendSlice(s, from)), gputest.Err(a.AppendSlice(nil, from)))
			}
		},
		"Array.Grow": func(w *world) func() error {
			a := w.array()
			return func() error { return a.Grow(mib) }
		},
		"Array.AppendUndefined": func(w *world) func() error {
			a := w.array()
			return func() error { _, err := a.AppendUndefined(mib); return err }
		},
		"Array.Move": func(w *world) func() error {
			a := w.array()
			return func() error { return keep[*vmm.Array[int32]](w)(a.Move(vmm.MoveOptions{Reserve: 128 * mib})) }
		},
		"Array.Fork": func(w *world) func() error {
			a, s := w.array(), w.stream()
			return func() error { return keep[*vmm.Array[int32]](w)(a.Fork(s, 1000, vmm.ForkOptions{})) }
		},
		"Array.Resize": func(w *world) func() error {
			a, s := w.array(), w.stream()
			return func() error { return errors.Join(a.Resize(s, 2*mib), a.Resize(nil, 3*mib)) }
		},
		"Array.Slice": func(w *world) func() error {
			a := w.array()
			return func() error { _, err := a.Slice(0, 10); return err }
		},
		"Array.SetAccess": func(w *world) func() error {
			a := w.array()
			return func() error { return a.SetAccess(w.access(vmm.ReadOnly)) }
		},
		"Array.ClipAfter": func(w *world) func() error {
			a, s := w.array(), w.stream()
			if err := a.Resize(nil, 0); err != nil {
				w.Fatal(err)
			}
			return func() error { return errors.Join(a.ClipAfter(s), w.drain()) }
		},
		"Array.CloseAfter": func(w *world) func() error {
			a, s := w.array(), w.stream()
			return func() error { return errors.Join(a.CloseAfter(s), w.drain()) }
		},
	},
)

var sliceCases = join(
	plain("Slice", (*world).slice, "Len", "Size", "Ptr"),
	table{
		"Slice.Slice": func(w *world) func() error {
			part := w.slice()
			return func() error { _, err := part.Slice(1, 2); return err }
		},
		"Slice.CopyFrom": copies(func(part vmm.Slice[int32], s *cuda.Stream, _ *cuda.HostBuffer) error {
			return part.CopyFrom(s, make([]int32, part.Len()))
		}),
		"Slice.CopyTo": copies(func(part vmm.Slice[int32], s *cuda.Stream, _ *cuda.HostBuffer) error {
			return part.CopyTo(s, make([]int32, part.Len()))
		}),
		"Slice.CopyFromHost": copies(func(part vmm.Slice[int32], s *cuda.Stream, h *cuda.HostBuffer) error {
			return part.CopyFromHost(s, h.All())
		}),
		"Slice.CopyToHost": copies(func(part vmm.Slice[int32], s *cuda.Stream, h *cuda.HostBuffer) error {
			return part.CopyToHost(s, h.All())
		}),
		"Slice.CopyFromSlice": func(w *world) func() error {
			to, from, s := w.slice(), w.slice(), w.stream()
			return func() error { return errors.Join(to.CopyFromSlice(s, from), to.CopyFromSlice(nil, from)) }
		},
		"Slice.Host": func(w *world) func() error {
			node := cuda.OnHostNUMA(0)
			b := made[*vmm.Buffer](w)(vmm.NewBuffer(w.dev, vmm.BufferOptions{Reserve: 2 * mib,
				Memory: vmm.Properties{Location: node}, Access: []vmm.Access{{Location: node, Mode: vmm.ReadWrite}}}))
			if err := b.Resize(nil, 100); err != nil {
				w.Fatal(err)
			}
			part := must[vmm.Slice[byte]](w)(b.Slice(0, 100))
			return func() error { return part.Host(touch[byte]) }
		},
		"Slice.Zero": copies(func(part vmm.Slice[int32], s *cuda.Stream, _ *cuda.HostBuffer) error { return part.Zero(s) }),
	},
)

// touch writes memory.
func touch[T any](data []T) error {
	clear(data)
	return nil
}

// copies does it on a stream, and without one.
func copies(do func(part vmm.Slice[int32], s *cuda.Stream, h *cuda.HostBuffer) error) operation {
	return func(w *world) func() error {
		part, s := w.slice(), w.stream()
		h := w.host(part.Size())
		return func() error { return errors.Join(do(part, s, h), do(part, nil, h)) }
	}
}

var ioCases = table{
	"NewWriter": func(w *world) func() error {
		b := w.buffer()
		return func() error { vmm.NewWriter(b); return nil }
	},
	"NewReader": func(w *world) func() error {
		b := w.buffer()
		return func() error { vmm.NewReader(b); return nil }
	},
	"Writer.Write": func(w *world) func() error {
		to := vmm.NewWriter(w.buffer())
		return func() error { _, err := to.Write(make([]byte, 3*mib)); return err }
	},
	"Writer.ReadFrom": func(w *world) func() error {
		to := vmm.NewWriter(w.buffer())
		return func() error { _, err := to.ReadFrom(bytes.NewReader(make([]byte, 9*mib))); return err }
	},
	"Reader.Read": func(w *world) func() error {
		from := vmm.NewReader(w.buffer())
		return func() error { _, err := from.Read(make([]byte, mib)); return err }
	},
	"Reader.WriteTo": func(w *world) func() error {
		from := vmm.NewReader(w.buffer())
		return func() error { _, err := from.WriteTo(io.Discard); return err }
	},
}
