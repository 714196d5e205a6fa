package multicast_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"sync"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/vmm"
)

// machineWith is a machine with so many devices that have multicast.
func machineWith(devices int) (*sim.Machine, *cuda.System) {
	m, err := sim.New(sim.WithMulticast(devices))
	check(err)
	sys, err := m.Open(cuda.Options{})
	check(err)
	return m, sys
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Three ranks add up what each of them has. Here they are goroutines; processes
// of a host get their group from rendezvous.Host and Join, and those of several
// hosts from its module etcd.
func ExampleNewTeam() {
	m, sys := machineWith(3)
	defer m.Close()
	defer sys.Close()
	groups, err := rendezvous.InProcess(3, rendezvous.Options{})
	check(err)
	sums := make([]byte, 3)
	var ranks sync.WaitGroup
	for r, group := range groups {
		ranks.Go(func() {
			defer group.Close()
			sum, err := rank(group, sys.Devices()[r])
			check(err)
			sums[r] = sum
		})
	}
	ranks.Wait()
	fmt.Println(sums)
	// Output: [6 6 6]
}

// rank takes part with a device: it puts its number into its replica, and has
// the first rank add up the replicas, when all have done so.
func rank(group *rendezvous.Group, dev *cuda.Device) (sum byte, err error) {
	ctx := context.Background()
	const n, counter = 1000, 4096 // elements, and where the arrivals are counted
	team, err := multicast.NewTeam(ctx, group, []*cuda.Device{dev}, 1<<20, multicast.TeamOptions{})
	if err != nil {
		return 0, err // the same kind of error on every rank: all can go on without
	}
	defer func() { err = errors.Join(err, team.Close()) }()
	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return 0, err
	}
	defer stream.Close()
	module, err := dev.LoadModule(kernels.Multimem)
	if err != nil {
		return 0, err
	}
	defer module.Close()
	launch := func(name string, args ...any) error {
		k, err := module.Kernel(name)
		if err != nil {
			return err
		}
		return k.Launch(stream, cuda.Threads(1), args...)
	}
	barrier := func(arrivals int) error {
		return launch(kernels.Barrier, team.Ptr()+counter, team.Replica(0)+counter, uint32(arrivals), team.AbortWord())
	}

	mine := bytes.Repeat([]byte{byte(team.First() + 1), 0, 0, 0}, n)
	err = errors.Join(
		stream.Memset(team.Replica(0), 0, 8192),
		stream.Upload(team.Replica(0), mine),
		stream.Synchronize(),
		group.Barrier(ctx, "the counters are zero"),
		barrier(team.Members()))
	if team.First() == 0 {
		err = errors.Join(err, launch(kernels.U32.AllReduce(), team.Ptr(), uint64(n)))
	}
	err = errors.Join(err, barrier(2*team.Members()), stream.Download(mine, team.Replica(0)))
	if err != nil {
		team.Abort() // what waits for the others need not wait any more
		return 0, err
	}
	return mine[0], team.Leave(ctx)
}

// An object by hand, in one process: what one device stores there all have.
func ExampleCreate() {
	m, sys := machineWith(2)
	defer m.Close()
	defer sys.Close()
	devices := sys.Devices()
	object, err := multicast.Create(sys, 2<<20, multicast.Properties{Devices: len(devices)})
	check(err)
	defer object.Close()
	for _, d := range devices { // all of them, before any memory is bound
		check(object.AddDevice(d))
	}
	var access []vmm.Access
	for _, d := range devices {
		memory, err := vmm.Create(d, object.Size(), vmm.Properties{})
		check(err)
		defer memory.Close()
		binding, err := object.Bind(d, 0, memory, 0, object.Size())
		check(err)
		defer binding.Close()
		access = append(access, vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite})
	}
	space, err := vmm.Reserve(devices[0], object.Size(), vmm.ReserveOptions{})
	check(err)
	defer space.Close()
	mapping, err := space.Map(0, object)
	check(err)
	defer mapping.Close()
	check(mapping.SetAccess(access...))
	fmt.Println(object)
	// Output: multicast object of 2 MiB for 2 devices
}
