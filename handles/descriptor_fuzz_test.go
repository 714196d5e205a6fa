package handles_test

import (
	"math"
	"reflect"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// drawn is any valid descriptor.
func drawn(t *rapid.T) handles.Descriptor {
	d := handles.Descriptor{
		Kind:         rapid.SampledFrom([]handles.Kind{handles.BufferKind, handles.ArrayKind}).Draw(t, "kind"),
		Compressible: rapid.Bool().Draw(t, "compressible"),
		RDMA:         rapid.Bool().Draw(t, "rdma"),
		Handle:       rapid.SampledFrom([]vmm.HandleTypes{vmm.PosixFD, vmm.Fabric}).Draw(t, "handle"),
		Generation:   rapid.Uint64().Draw(t, "generation"),
		Exporter:     handles.Process{PID: rapid.Uint32().Draw(t, "pid")},
	}
	copy(d.Exporter.Instance[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "instance"))
	id := int(rapid.Int32Range(0, math.MaxInt32).Draw(t, "id"))
	if rapid.Bool().Draw(t, "on device") {
		d.Location = cuda.OnDevice(id)
		copy(d.Device[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "device"))
		d.Device[0] |= 1
	} else {
		d.Location = cuda.OnHostNUMA(id)
	}
	if n := rapid.IntRange(0, 40).Draw(t, "chunks"); n > 0 {
		d.Chunks = rapid.SliceOfN(rapid.IntRange(1, 1<<54), n, n).Draw(t, "sizes")
	}
	unit := 1
	if d.Kind == handles.ArrayKind {
		d.Element, d.ElementSize = handles.Record, rapid.IntRange(1, math.MaxUint32).Draw(t, "element size")
		if known := handles.ElementType(rapid.IntRange(0, int(handles.Float8E5M2)).Draw(t, "element")); known.Size() > 0 {
			d.Element, d.ElementSize = known, known.Size()
		}
		unit = d.ElementSize
	}
	d.Length = rapid.IntRange(0, d.Size()/unit).Draw(t, "length")
	return d
}

func TestDescriptorsComeBackAsTheyWere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := drawn(t)
		b, err := d.MarshalBinary()
		require.NoError(t, err)
		var fromBinary handles.Descriptor
		require.NoError(t, fromBinary.UnmarshalBinary(b))
		require.Equal(t, d, fromBinary)

		// Different values have different bytes.
		e := drawn(t)
		other, err := e.MarshalBinary()
		require.NoError(t, err)
		require.Equal(t, reflect.DeepEqual(d, e), string(b) == string(other))
	})
}

// FuzzDescriptor decodes any bytes: they are the one form of a valid descriptor, or an
// error of this package. Nothing panics.
func FuzzDescriptor(f *testing.F) {
	for _, change := range []func(d *handles.Descriptor){
		func(*handles.Descriptor) {},
		func(d *handles.Descriptor) { d.Chunks, d.Length = d.Chunks[:1], 1 },
		func(d *handles.Descriptor) { d.Element, d.ElementSize = handles.Record, 4 },
		func(d *handles.Descriptor) {
			d.Kind, d.Element, d.ElementSize, d.Length, d.Chunks = handles.BufferKind, 0, 0, 0, nil
		},
		func(d *handles.Descriptor) {
			d.Kind, d.Element, d.ElementSize, d.Chunks = handles.BufferKind, 0, 0, []int{1 << 60}
		},
		func(d *handles.Descriptor) { d.Location, d.Device = cuda.OnHostNUMA(1), cuda.UUID{} },
	} {
		d := anArray()
		change(&d)
		b, err := d.MarshalBinary()
		require.NoError(f, err)
		f.Add(b)
		f.Add(b[:len(b)-1])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var d handles.Descriptor
		if err := d.UnmarshalBinary(b); err == nil {
			again, err := d.MarshalBinary()
			require.NoError(t, err)
			require.Equal(t, b, again)
			require.LessOrEqual(t, d.Size(), 1<<60)
		} else {
			var e *peer.Error
			require.ErrorAs(t, err, &e)
			require.Zero(t, d)
		}
	})
}
