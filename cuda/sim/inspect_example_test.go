//go:build linux && (amd64 || arm64)

package sim_test

import (
	"fmt"
	"log"
	"os"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
)

// Two processes, here two openings, are on one machine, and each has a context,
// which takes memory as on a GPU.
func ExampleInspect() {
	folder, err := os.MkdirTemp("", "machine")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(folder)
	options := sim.Options{
		Folder:  folder,
		Devices: []sim.DeviceOptions{{Memory: 8 << 30, ContextMemory: 512 << 20}},
	}
	for range 2 {
		machine, err := sim.New(options)
		if err != nil {
			log.Fatal(err)
		}
		system, err := machine.OpenOwned(cuda.Options{})
		if err != nil {
			log.Fatal(err)
		}
		defer system.Close()
		device, err := system.Device(0)
		if err != nil {
			log.Fatal(err)
		}
		if _, err := device.Context(); err != nil {
			log.Fatal(err)
		}
	}

	usage, err := sim.Inspect(folder)
	if err != nil {
		log.Fatal(err)
	}
	for i, d := range usage.Devices {
		fmt.Printf("device %d: %d of %d MiB are taken\n", i, d.Taken>>20, d.Memory>>20)
	}
	for _, p := range usage.Processes {
		fmt.Printf("this process: %v, %d MiB\n", p.PID == os.Getpid(), p.Own[0]>>20)
	}
	// Output:
	// device 0: 1024 of 8192 MiB are taken
	// this process: true, 512 MiB
	// this process: true, 512 MiB
}
