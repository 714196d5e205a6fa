package main

import (
	"context"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/samples/internal/app"
)

// Offsets in each replica.
const (
	partialAt = 0   // the device's own sum of squares
	arrivedAt = 64  // counts the devices whose sum is there
	normAt    = 128 // the result
)

// byMulticast returns the norm as each device has it. Each device puts its own
// sum into its replica, and loads the sum of all replicas through the multicast
// address when all have arrived.
func byMulticast(ctx context.Context, ranks []rank) (norms []float64, err error) {
	// One process has all devices here. Processes of one device each do the same
	// as the ranks of a larger group (rendezvous.Host and Join).
	groups, err := rendezvous.InProcess(1, rendezvous.Options{})
	if err != nil {
		return nil, err
	}
	defer app.Close(groups[0], &err)
	var devices []*cuda.Device
	for _, r := range ranks {
		devices = append(devices, r.device)
	}
	const size = 4096
	team, err := multicast.NewTeam(ctx, groups[0], devices, size, multicast.TeamOptions{})
	if err != nil {
		return nil, err
	}
	defer app.Close(team, &err)
	modules := make([]*cuda.Module, len(ranks))
	for i, r := range ranks {
		if modules[i], err = r.device.LoadModule(kernels.Multimem); err != nil {
			return nil, err
		}
		defer app.Close(modules[i], &err)
		if err := r.stream.Memset(team.Replica(i), 0, size); err != nil {
			return nil, err
		}
	}
	if err := synchronize(ranks); err != nil { // every counter is zero before a device arrives
		return nil, err
	}
	mc := team.Ptr()
	for i, r := range ranks {
		replica := team.Replica(i)
		if err := r.launch(modules[i], kernels.L2Norm, r.x.Ptr(), uint64(r.x.Len()), mc+partialAt, replica+partialAt,
			mc+arrivedAt, replica+arrivedAt, uint32(team.Members()), replica+normAt, team.AbortWord()); err != nil {
			team.Abort() // the kernels that run would wait for this one
			return nil, err
		}
	}
	norms = make([]float64, len(ranks))
	for i, r := range ranks {
		if norms[i], err = r.number(team.Replica(i) + normAt); err != nil {
			return nil, err
		}
	}
	return norms, nil
}
