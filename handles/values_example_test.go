//go:build linux

package handles_test

import (
	"context"
	"fmt"
	"log"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/vmm"
)

// A descriptor is a plain value with one binary form, which a receiver checks against
// its own limits before it reserves anything.
func ExampleDescriptor() {
	element, size := handles.ElementOf[float32]()
	d := handles.Descriptor{
		Kind: handles.ArrayKind, Element: element, ElementSize: size, Length: 1000,
		Chunks: []int{2 << 20, 2 << 20}, Location: cuda.OnDevice(0), Device: cuda.UUID{1},
		Handle: vmm.PosixFD, Exporter: handles.Self(),
	}
	form, err := d.MarshalBinary()
	check(err)

	var got handles.Descriptor
	check(got.UnmarshalBinary(form))
	check(got.Validate(handles.Limits{Granularity: 2 << 20, MaxBytes: 1 << 30}))
	fmt.Println(got.Kind, "of", got.Element, got.Size())
	fmt.Println(got.Exporter == handles.Self())
	fmt.Println(got.Validate(handles.Limits{Granularity: 2 << 20, MaxBytes: 1 << 20}))
	// Output:
	// array of float32 4194304
	// true
	// handles.Descriptor.Validate: too large: 4 MiB, of which 1 MiB are allowed; share less, or raise the importer's limit
}

// A lease keeps memory until its receivers have imported it, and its offer travels in
// any way.
func ExampleLeaseBuffer() {
	machine, err := sim.New(sim.Options{})
	check(err)
	sys, err := machine.OpenOwned(cuda.Options{})
	check(err)
	defer sys.Close()
	dev := sys.Devices()[0]
	b, err := vmm.NewBuffer(dev, vmm.BufferOptions{})
	check(err)
	_, err = b.Append(nil, []byte("shared"))
	check(err)

	lease, err := handles.LeaseBuffer(b, handles.LeaseOptions{Handle: vmm.PosixFD, Receivers: 1})
	check(err)
	defer lease.Close()
	check(b.Close()) // the lease holds the memory
	open := handles.Leases()
	fmt.Println(open.Open, "lease of", open.Bytes, "bytes")

	offer := lease.Offer()
	got, err := handles.ImportBuffer(dev, offer, handles.ImportOptions{ReadOnly: true})
	check(err)
	text, err := offer.Receipt().MarshalText() // goes back in any way
	check(err)
	var receipt handles.Receipt
	check(receipt.UnmarshalText(text))
	check(lease.Imported(receipt))
	check(lease.Wait(context.Background()))
	fmt.Println(got.Len(), "bytes were imported by this process:", receipt.Importer == handles.Self())
	check(got.Close())
	// Output:
	// 1 lease of 2097152 bytes
	// 6 bytes were imported by this process: true
}

// Arrays of the markers are arrays of numbers that Go lacks, for the other process.
func ExampleElementOf() {
	for _, of := range []func() (handles.ElementType, int){
		handles.ElementOf[handles.BF16], handles.ElementOf[handles.F16], handles.ElementOf[handles.F8E4M3], handles.ElementOf[handles.F8E5M2], handles.ElementOf[uint16],
	} {
		fmt.Println(of())
	}
	// Output:
	// bfloat16 2
	// float16 2
	// float8_e4m3 1
	// float8_e5m2 1
	// uint16 2
}

// A manifest says which tensors memory holds. It travels as text, and is compared before the
// memory is used.
func ExampleManifest() {
	published := handles.Manifest{Bytes: 1 << 20, Tensors: []handles.Tensor{
		{Name: "embed", Element: handles.BFloat16, Shape: []int{256, 512}},
		{Name: "scale", Element: handles.Float32, Offset: 256 << 10},
	}}
	text, err := published.MarshalBinary()
	if err != nil {
		log.Fatal(err)
	}

	var m handles.Manifest
	if err := m.UnmarshalBinary(text); err != nil { // it checks what another process wrote
		log.Fatal(err)
	}
	embed := m.ByName()["embed"]
	fmt.Println(embed.Element, embed.Shape, embed.Size(), "bytes at", embed.Offset)

	expected := published
	expected.Tensors = []handles.Tensor{{Name: "embed", Element: handles.Float16, Shape: []int{256, 512}}, published.Tensors[1]}
	fmt.Println(m.Match(&expected))
	// Output:
	// bfloat16 [256 512] 262144 bytes at 0
	// handles.Manifest.Match: not what was declared: tensor "embed" has element bfloat16 instead of float16; use memory of the same model, laid out in the same way
}
