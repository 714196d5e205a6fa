//go:build linux

package handles_test

import (
	"context"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/vmm"
)

// One end shares an array, the other maps the same memory. In a program the ends
// are in two processes.
func ExampleSendArray() {
	ctx := context.Background()
	machine, err := sim.New(sim.Options{})
	check(err)
	system, err := machine.OpenOwned(cuda.Options{})
	check(err)
	defer system.Close()
	device := system.Devices()[0]
	near, file, err := peer.Pair(peer.Options{})
	check(err)
	defer near.Close()
	far, err := peer.Inherit(file, peer.Options{})
	check(err)
	defer far.Close()

	numbers, err := vmm.NewArray[float32](device, vmm.BufferOptions{})
	check(err)
	_, err = numbers.Append(nil, []float32{1, 2, 3})
	check(err)
	sent := make(chan error, 1)
	go func() { sent <- handles.SendArray(ctx, near, numbers) }()

	shared, err := handles.ReceiveArray[float32](ctx, far, device, handles.ImportOptions{ReadOnly: true})
	check(err)
	check(<-sent)
	check(numbers.Close()) // the memory lives on
	got := make([]float32, shared.Len())
	check(shared.All().CopyTo(nil, got))
	fmt.Println(got)
	check(shared.Close())
	// Output:
	// [1 2 3]
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
