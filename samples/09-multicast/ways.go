package main

import (
	"context"
	"encoding/binary"
	"errors"
	"math"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/vmm"
)

func float64Of(b []byte) float64 { return math.Float64frombits(binary.NativeEndian.Uint64(b)) }

const word = 8 // the size of a partial sum

// byCopies: each device adds up its own part and copies the sum to all others,
// and each adds up what it was sent.
func byCopies(parts []*part) (norms []float64, moved *traffic, err error) {
	var access []vmm.Access
	for _, p := range parts {
		access = append(access, vmm.Access{Location: p.device.Location(), Mode: vmm.ReadWrite})
	}
	var closing []func() error
	defer func() {
		for i := len(closing) - 1; i >= 0; i-- {
			err = errors.Join(err, closing[i]())
		}
	}()
	var modules []*cuda.Module
	var sums []cuda.Ptr // a word for each device's sum, and one for the norm
	for i, p := range parts {
		m, err := p.device.LoadModule(normText)
		if err != nil {
			return nil, nil, err
		}
		closing = append(closing, m.Close)
		modules = append(modules, m)
		b, err := vmm.NewBuffer(p.device, vmm.BufferOptions{Access: own(access, i)})
		if err != nil {
			return nil, nil, err
		}
		closing = append(closing, b.Close)
		if err := b.Resize(p.stream, (len(parts)+1)*word); err != nil { // zero
			return nil, nil, err
		}
		sums = append(sums, b.Ptr())
	}
	moved = newTraffic(len(parts))
	for i, p := range parts {
		mine := sums[i] + cuda.Ptr(i*word)
		if err := p.launch(modules[i], sumOfSquares, p.x.Ptr(), uint64(p.n), mine); err != nil {
			return nil, nil, err
		}
		// The others' words were zeroed on their streams.
		if err := p.stream.Synchronize(); err != nil {
			return nil, nil, err
		}
	}
	for i, p := range parts {
		for j := range parts {
			if i == j {
				continue
			}
			at := cuda.Ptr(i * word)
			if err := p.stream.Copy(sums[j]+at, sums[i]+at, word); err != nil {
				return nil, nil, err
			}
			moved.copied(i, j, word)
		}
	}
	for _, p := range parts {
		if err := p.stream.Synchronize(); err != nil {
			return nil, nil, err
		}
	}
	for i, p := range parts {
		norm := sums[i] + cuda.Ptr(len(parts)*word)
		if err := p.launch(modules[i], rootOfSum, sums[i], uint64(len(parts)), norm); err != nil {
			return nil, nil, err
		}
		v, err := p.number(norm)
		if err != nil {
			return nil, nil, err
		}
		norms = append(norms, v)
	}
	return norms, moved, nil
}

// own puts a device's own access first.
func own(access []vmm.Access, i int) []vmm.Access {
	return append([]vmm.Access{access[i]}, append(append([]vmm.Access(nil), access[:i]...), access[i+1:]...)...)
}

// Where things lie in each replica.
const (
	partialAt = 0   // the device's own sum of squares
	arrivedAt = 64  // counts the devices that have theirs
	normAt    = 128 // the result
)

// byMulticast: each device puts its own sum into its replica, and loads the sum
// of all replicas through the multicast address when all have arrived.
func byMulticast(ctx context.Context, parts []*part) (norms []float64, moved *traffic, err error) {
	// One process has all devices here. With a process for each the ranks of a
	// group do the same (rendezvous.Host and Join).
	groups, err := rendezvous.InProcess(1, rendezvous.Options{})
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, groups[0].Close()) }()
	var devices []*cuda.Device
	for _, p := range parts {
		devices = append(devices, p.device)
	}
	team, err := multicast.NewTeam(ctx, groups[0], devices, 4096, multicast.TeamOptions{})
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, team.Close()) }()
	var modules []*cuda.Module
	defer func() {
		for _, m := range modules {
			err = errors.Join(err, m.Close())
		}
	}()
	for i, p := range parts {
		m, err := p.device.LoadModule(kernels.Multimem)
		if err != nil {
			return nil, nil, err
		}
		modules = append(modules, m)
		if err := p.stream.Memset(team.Replica(i), 0, 4096); err != nil {
			return nil, nil, err
		}
	}
	for _, p := range parts { // nobody arrives at a counter that is not zero yet
		if err := p.stream.Synchronize(); err != nil {
			return nil, nil, err
		}
	}
	moved = newTraffic(len(parts))
	for i, p := range parts {
		mc, replica := team.Ptr(), team.Replica(i)
		if err := p.launch(modules[i], kernels.L2Norm, p.x.Ptr(), uint64(p.n), mc+partialAt, replica+partialAt,
			mc+arrivedAt, replica+arrivedAt, uint32(team.Members()), replica+normAt, team.AbortWord()); err != nil {
			team.Abort() // those that run would wait for this one
			return nil, nil, err
		}
		moved.multiplied(i, 4) // it adds one to the counter in every replica
		moved.reduced(i, word)
	}
	for i, p := range parts {
		v, err := p.number(team.Replica(i) + normAt)
		if err != nil {
			return nil, nil, err
		}
		norms = append(norms, v)
	}
	return norms, moved, nil
}
