package fabric_test

import (
	"fmt"
	"log"
	"os"
	"slices"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric"
	"github.com/cuvmm/cuvmm/vmm"
)

// What keeps a process without an open channel from sharing over a fabric.
func ExampleDiagnose() {
	machine, err := sim.New(sim.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer machine.Close()
	sys, err := machine.Open(cuda.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()

	d, err := fabric.Diagnose(fabric.Options{Trial: true}, sys.Devices()...)
	if err != nil {
		log.Fatal(err)
	}
	for _, f := range d.Findings {
		if f.Severity == fabric.Problem {
			fmt.Printf("%s: %s\n  %s\n", f.Check, f.Text, f.Remedy)
		}
	}
	// Output:
	// nodes: there is no channel in /dev/nvidia-caps-imex-channels
	//   the software driver opens the channels that sim.Options.Fabric names
	// create: memory with a fabric handle cannot be created: CUDA_ERROR_NOT_PERMITTED (800)
	//   open one channel to this process, the same one to all that share memory
}

// The error of memory that cannot be created says why by itself.
func ExampleFindings() {
	machine, err := sim.New(sim.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer machine.Close()
	sys, err := machine.Open(cuda.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()

	_, err = vmm.Create(sys.Devices()[0], 2<<20, vmm.Properties{Handles: vmm.Fabric})
	for _, f := range fabric.Findings(err) {
		fmt.Println(f.Severity, f.Check)
	}
	// Output:
	// ok major
	// ok channel count
	// problem nodes
	// ok attribute
	// note fabric state
}

// A diagnosis is a plain value: the machine's channels and devices, and what was found
// of each.
func ExampleDiagnosis() {
	folder, err := os.MkdirTemp("", "") // processes of one fabric share a machine
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(folder)
	machine, err := sim.New(sim.Options{Folder: folder, Fabric: sim.Fabric{Channels: []int{3}, Cluster: [16]byte{1}, Clique: 7}})
	if err != nil {
		log.Fatal(err)
	}
	defer machine.Close()
	sys, err := machine.Open(cuda.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()

	d, err := fabric.Diagnose(fabric.Options{}, sys.Devices()...)
	if err != nil {
		log.Fatal(err)
	}
	channel := func(c fabric.Channel) string { return fmt.Sprint("channel ", c.Number, " accessible: ", c.Accessible) }
	device := func(s fabric.DeviceState) string { return fmt.Sprint("device ", s.Ordinal, " is in clique ", s.Clique) }
	problem := func(f fabric.Finding) bool { return f.Severity == fabric.Severity("problem") }
	fmt.Println("works:", d.Works())
	fmt.Println(channel(d.Channels[0]))
	fmt.Println(device(d.Devices[0]))
	fmt.Println("a problem:", slices.ContainsFunc(d.Findings, problem))
	// Output:
	// works: true
	// channel 3 accessible: true
	// device 0 is in clique 01000000-0000-0000-0000-000000000000.7
	// a problem: false
}
