package capturetest

import (
	"errors"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/managed"
)

var managedCases = join(
	plain("Attachment", func(*world) managed.Attachment { return managed.AttachHost }, "String"),
	plain("Range", func(w *world) managed.Range { return w.managed().Range }, "Ptr", "Len", "ReadMostly", "Preferred", "LastPrefetch", "Bytes"),
	plain("Buffer", (*world).managed, "Ptr", "Len", "ReadMostly", "Preferred", "LastPrefetch", "Bytes", "Device", "Valid", "Managed", "AccessedBy", "Released", "Close"),
	plain("AccessedBy", func(w *world) managed.AccessedBy { return w.managed().AccessedBy() }, "All"),
	plain("Array", (*world).managedArray, "Buffer", "Ptr", "Len", "Released", "Close"),
	plain("Allocator", (*world).allocator, "Device", "Stats", "Released"),
	onRange("Range"), onRange("Buffer"),
	table{
		"Range.AccessedBy": func(w *world) func() error {
			b := w.managed()
			return func() error { b.AccessedBy(); return nil }
		},
		"AccessedBy.Add":    onAccessedBy(func(a managed.AccessedBy) error { return a.Add(cuda.OnHost()) }),
		"AccessedBy.Remove": onAccessedBy(func(a managed.AccessedBy) error { return a.Remove(cuda.OnHost()) }),
		"AccessedBy.Contains": onAccessedBy(func(a managed.AccessedBy) error {
			_, err := a.Contains(cuda.OnHost())
			return err
		}),
		"AccessedBy.Assign": onAccessedBy(func(a managed.AccessedBy) error { return a.Assign(cuda.OnDevice(0), cuda.OnHost()) }),
		"PrefetchBatch": onRanges(func(s *cuda.Stream, r []managed.Range) error {
			return managed.PrefetchBatch(s, r, cuda.OnHost(), cuda.OnDevice(0))
		}),
		"DiscardBatch": onRanges(managed.DiscardBatch),
		"DiscardPrefetchBatch": onRanges(func(s *cuda.Stream, r []managed.Range) error {
			return managed.DiscardPrefetchBatch(s, r, cuda.OnHost())
		}),
		"GPUFirst": func(w *world) func() error {
			b, s := w.managed(), w.stream()
			return func() error { return errors.Join(managed.GPUFirst(s, b.Range), managed.GPUFirst(nil, b.Range)) }
		},
		"ReadMostly": func(w *world) func() error {
			b := w.managed()
			return func() error { return managed.ReadMostly(nil, b.Range) }
		},
	},
	managedMakers,
)

var managedMakers = table{
	"New": func(w *world) func() error {
		return func() error {
			return keep[*managed.Buffer](w)(managed.New(w.dev, 2*mib, managed.Options{Placement: managed.GPUFirst}))
		}
	},
	"View": func(w *world) func() error {
		b := w.managed()
		return func() error {
			return keep[*managed.Buffer](w)(managed.View(w.dev, b.Ptr(), b.Len(), managed.ViewOptions{}))
		}
	},
	"Buffer.Clone": func(w *world) func() error {
		b := w.managed()
		return func() error { return keep[*managed.Buffer](w)(b.Clone()) }
	},
	"Buffer.Attach": func(w *world) func() error {
		b, s := w.managed(), w.stream()
		return func() error { return b.Attach(s, managed.AttachGlobal) }
	},
	"Buffer.CloseAfter": func(w *world) func() error {
		b, s := w.managed(), w.stream()
		return func() error { return errors.Join(b.CloseAfter(s), w.drain()) }
	},
	"NewAllocator": func(w *world) func() error {
		return func() error { return keep[*managed.Allocator](w)(managed.NewAllocator(w.dev, managed.Options{})) }
	},
	"Allocator.New": func(w *world) func() error {
		a, s := w.allocator(), w.stream()
		return func() error { return keep[*managed.Buffer](w)(a.New(s, 2*mib)) }
	},
	"Allocator.Close": func(w *world) func() error {
		a := w.allocator()
		must[*managed.Buffer](w)(a.New(nil, 2*mib))
		return a.Close
	},
	"NewArray": func(w *world) func() error {
		a := w.allocator()
		return func() error { return keep[*managed.Array[float32]](w)(managed.NewArray[float32](nil, a, mib)) }
	},
	"ArrayOf": func(w *world) func() error {
		b := w.managed()
		return func() error { _, err := managed.ArrayOf[int64](b); return err }
	},
	"Array.Slice": func(w *world) func() error {
		a := w.managedArray()
		return func() error { _, err := a.Slice(1, 10); return err }
	},
	"Array.Host": func(w *world) func() error {
		a, s := w.managedArray(), w.stream()
		return func() error { return a.Host(s, touch[int32]) }
	},
	"Array.CloseAfter": func(w *world) func() error {
		a, s := w.managedArray(), w.stream()
		return func() error { return errors.Join(a.CloseAfter(s), w.drain()) }
	},
}

// onRange are the methods of a Range, which a Buffer has too.
func onRange(object string) table {
	t := table{}
	for name, do := range map[string]func(r managed.Range, s *cuda.Stream) error{
		"Slice":         func(r managed.Range, _ *cuda.Stream) error { _, err := r.Slice(4096, 4196); return err },
		"SetReadMostly": func(r managed.Range, _ *cuda.Stream) error { return r.SetReadMostly(true) },
		"SetPreferred":  func(r managed.Range, _ *cuda.Stream) error { return r.SetPreferred(cuda.OnDevice(0)) },
		"Prefetch": func(r managed.Range, s *cuda.Stream) error {
			return errors.Join(r.Prefetch(s, cuda.OnDevice(0)), r.Prefetch(nil, cuda.OnHost()))
		},
		"Discard": func(r managed.Range, s *cuda.Stream) error { return errors.Join(r.Discard(s), r.Discard(nil)) },
		"DiscardPrefetch": func(r managed.Range, s *cuda.Stream) error {
			return errors.Join(r.DiscardPrefetch(s, cuda.OnHost()), r.DiscardPrefetch(nil, cuda.OnDevice(0)))
		},
		"Host": func(r managed.Range, s *cuda.Stream) error { return r.Host(s, touch[byte]) },
	} {
		t[object+"."+name] = func(w *world) func() error {
			b, s := w.managed(), w.stream()
			return func() error { return do(b.Range, s) }
		}
	}
	return t
}

func onAccessedBy(do func(a managed.AccessedBy) error) operation {
	return func(w *world) func() error {
		a := w.managed().AccessedBy()
		return func() error { return do(a) }
	}
}

// onRanges works on two ranges of two buffers.
func onRanges(do func(s *cuda.Stream, r []managed.Range) error) operation {
	return func(w *world) func() error {
		r, s := []managed.Range{w.managed().Range, w.managed().Range}, w.stream()
		return func() error { return do(s, r) }
	}
}

func (w *world) managed() *managed.Buffer {
	return made[*managed.Buffer](w)(managed.New(w.dev, 2*mib, managed.Options{}))
}

func (w *world) managedArray() *managed.Array[int32] {
	return must[*managed.Array[int32]](w)(managed.ArrayOf[int32](w.managed()))
}

func (w *world) allocator() *managed.Allocator {
	return made[*managed.Allocator](w)(managed.NewAllocator(w.dev, managed.Options{Placement: managed.ReadMostly}))
}
