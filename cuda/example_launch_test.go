package cuda_test

import (
	"fmt"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
)

// A cooperative launch runs all blocks at once, so the device says how many there
// can be. More than 48 KiB of shared memory need no more than asking for them.
func ExampleKernel_BlocksAtOnce() {
	machine, err := sim.New(sim.Options{})
	check(err)
	sys, err := machine.OpenOwned(cuda.Options{})
	check(err)
	defer sys.Close()
	dev := sys.Devices()[0]
	module, err := dev.LoadModule(kernels.Basic)
	check(err)
	defer module.Close()
	fill, err := module.Kernel(kernels.Fill)
	check(err)

	launch := cuda.Launch{Block: [3]int{256, 1, 1}, SharedBytes: 100 << 10, Cooperative: true}
	blocks, err := fill.BlocksAtOnce(launch)
	check(err)
	most, err := fill.MaxShared()
	check(err)
	fmt.Println(blocks, "blocks at once, with up to", most, "bytes of shared memory each")
	// Output: 264 blocks at once, with up to 232448 bytes of shared memory each
}

// The streams of urgent work have a greater priority than those of the rest.
func ExampleDevice_StreamPriorities() {
	machine, err := sim.New(sim.Options{})
	check(err)
	sys, err := machine.OpenOwned(cuda.Options{})
	check(err)
	defer sys.Close()
	least, greatest, err := sys.Devices()[0].StreamPriorities()
	check(err)
	urgent, err := sys.Devices()[0].NewStream(cuda.StreamOptions{Priority: greatest})
	check(err)
	defer urgent.Close()
	fmt.Println("from", least, "to", greatest)
	// Output: from 0 to -5
}
