package auto_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/cuda/sim"
)

// Programs open the driver that is there with the zero Options. This one takes the
// software driver, on a machine of its own.
func ExampleOpen() {
	sys, err := auto.Open(auto.Options{Driver: auto.Software, Machine: sim.Options{Devices: []sim.DeviceOptions{{Memory: 1 << 30}}}})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	fmt.Println(sys.Driver(), sys.Devices()[0].TotalMemory())
	// Output: software driver, CUDA 13.0 1073741824
}

func ExampleChoice() {
	_, err := auto.Open(auto.Options{Driver: auto.Choice("none")})
	fmt.Println(errors.Is(err, cuda.ErrInvalidArgument))
	// Output: true
}
