package multicast_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/vmm"
)

// Another process of the host imports the object by a descriptor, and adds and binds
// its own device. Here it is the same process.
func ExampleImport() {
	m, sys := machineWith(2)
	defer m.Close()
	defer sys.Close()
	object, err := multicast.Create(sys, 2<<20, multicast.Properties{Devices: 2, Handles: vmm.PosixFD})
	check(err)
	defer object.Close()
	fd, err := object.Export() // sent to the other process, with size and number of devices
	check(err)
	defer fd.Close()

	imported, err := multicast.Import(sys, fd, object.Size(), 2)
	check(err)
	defer imported.Close()
	check(object.AddDevice(sys.Devices()[0]))
	check(imported.AddDevice(sys.Devices()[1]))
	fmt.Println(imported, "of", imported.Properties().Devices)
	// Output: multicast object of 2 MiB for 2 devices of 2
}

// A process of another host on the same NVLink fabric imports the object by 64 bytes,
// which travel as text. The exporter keeps the object until then.
func ExampleImportFabric() {
	folder, err := os.MkdirTemp("", "machine")
	check(err)
	defer os.RemoveAll(folder)
	o := sim.WithMulticast(1)
	o.Folder, o.Fabric = folder, sim.Fabric{Channels: []int{0}} // a machine on a fabric
	m, err := sim.New(o)
	check(err)
	defer m.Close()
	sys, err := m.Open(cuda.Options{})
	check(err)
	defer sys.Close()
	object, err := multicast.Create(sys, 2<<20, multicast.Properties{Devices: 1, Handles: vmm.Fabric})
	check(err)
	defer object.Close()
	handle, err := object.ExportFabric()
	check(err)
	text, err := handle.MarshalText()
	check(err)

	var received cuda.FabricHandle
	check(received.UnmarshalText(text))
	imported, err := multicast.ImportFabric(sys, received, object.Size(), 1)
	check(err)
	defer imported.Close()
	fmt.Println(imported)
	// Output: multicast object of 2 MiB for 1 device
}

// A device binds half of its memory to the first half of the object, and unbinds it
// when the work on a stream has passed.
func ExampleObject_Bind() {
	m, sys := machineWith(1)
	defer m.Close()
	defer sys.Close()
	dev := sys.Devices()[0]
	object, err := multicast.Create(sys, 4<<20, multicast.Properties{Devices: 1})
	check(err)
	defer object.Close()
	check(object.AddDevice(dev))
	memory, err := vmm.Create(dev, 4<<20, vmm.Properties{})
	check(err)
	defer memory.Close()
	var first *multicast.Binding
	first, err = object.Bind(dev, 0, memory, 2<<20, 2<<20)
	check(err)
	fmt.Println(first.Size()>>20, "MiB at", first.Offset())

	stream, err := dev.NewStream(cuda.StreamOptions{})
	check(err)
	defer stream.Close()
	check(first.CloseAfter(stream))
	fmt.Println(first.Released().Wait(context.Background()))
	// Output:
	// 2 MiB at 0
	// <nil>
}

// Every rank learns that there is no team, and why, and can go on without one.
func ExampleTeamError() {
	machine, err := sim.New(sim.Options{}) // its devices have no multicast
	check(err)
	defer machine.Close()
	sys, err := machine.Open(cuda.Options{})
	check(err)
	defer sys.Close()
	groups, err := rendezvous.InProcess(1, rendezvous.Options{})
	check(err)
	defer groups[0].Close()
	o := multicast.TeamOptions{CallTimeout: 5 * time.Second}
	_, err = multicast.NewTeam(context.Background(), groups[0], sys.Devices()[:1], 1<<20, o)

	var failed *multicast.TeamError
	if errors.As(err, &failed) {
		fmt.Println("ranks", failed.Ranks, "at step", failed.Step)
	}
	fmt.Println("go on by copies:", errors.Is(err, cuda.ErrNotSupported))
	// Output:
	// ranks [0] at step plan
	// go on by copies: true
}
