//go:build linux

package handles_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/vmm"
)

// An array goes to another process, or another host of the fabric, as a text.
func ExampleLeaseArray() {
	folder, err := os.MkdirTemp("", "machine")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(folder)
	machine, err := sim.New(sim.Options{Folder: folder, Fabric: sim.Fabric{Channels: []int{0}}})
	if err != nil {
		log.Fatal(err)
	}
	defer machine.Close()
	sys, err := machine.Open(cuda.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	dev := sys.Devices()[0]

	// The exporter keeps the memory until one receiver has it, a minute at most.
	array, err := vmm.NewArray[int32](dev, vmm.BufferOptions{Memory: vmm.Properties{Handles: vmm.PreferFabric}})
	if err != nil {
		log.Fatal(err)
	}
	defer array.Close()
	if _, err := array.Append(nil, []int32{1, 2, 3}); err != nil {
		log.Fatal(err)
	}
	lease, err := handles.LeaseArray(array, handles.LeaseOptions{Receivers: 1, Timeout: time.Minute})
	if err != nil {
		log.Fatal(err)
	}
	defer lease.Close()
	text, err := lease.Offer().MarshalText() // to a file, an argument, etcd
	if err != nil {
		log.Fatal(err)
	}

	// The receiver.
	var offer handles.Offer
	if err := offer.UnmarshalText(text); err != nil {
		log.Fatal(err)
	}
	same, err := handles.ImportArray[int32](dev, offer, handles.ImportOptions{ReadOnly: true})
	if err != nil {
		log.Fatal(err)
	}
	defer same.Close()
	receipt := offer.Receipt() // goes back as text

	// The exporter again.
	if err := lease.Imported(receipt); err != nil {
		log.Fatal(err)
	}
	numbers := make([]int32, same.Len())
	if err := same.All().CopyTo(nil, numbers); err != nil {
		log.Fatal(err)
	}
	fmt.Println(numbers, lease.Wait(context.Background()))
	// Output: [1 2 3] <nil>
}
