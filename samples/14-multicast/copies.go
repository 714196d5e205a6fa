package main

import (
	_ "embed"
	"math"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

// word is the size of a partial sum.
const word = 8

// byCopies returns the norm as each device has it. Each device sums the squares
// of its own part, copies the sum to all others, and adds up what it was sent.
func byCopies(ranks []rank) (norms []float64, err error) {
	modules := make([]*cuda.Module, len(ranks))
	sums := make([]*vmm.Buffer, len(ranks)) // a word for each device's sum, and one for the norm
	for i, r := range ranks {
		if modules[i], err = r.device.LoadModule(normText); err != nil {
			return nil, err
		}
		defer app.Close(modules[i], &err)
		access := []vmm.Access{{Location: r.device.Location(), Mode: vmm.ReadWrite}} // its own first
		for j, other := range ranks {
			if j != i {
				access = append(access, vmm.Access{Location: other.device.Location(), Mode: vmm.ReadWrite})
			}
		}
		if sums[i], err = vmm.NewBuffer(r.device, vmm.BufferOptions{Access: access}); err != nil {
			return nil, err
		}
		defer app.Close(sums[i], &err)
		if err := sums[i].Resize(r.stream, (len(ranks)+1)*word); err != nil { // zeros
			return nil, err
		}
		if err := r.launch(modules[i], sumOfSquares, r.x.Ptr(), uint64(r.x.Len()), sums[i].Ptr()+cuda.Ptr(i*word)); err != nil {
			return nil, err
		}
	}
	if err := synchronize(ranks); err != nil { // every word is zero before another device's sum arrives
		return nil, err
	}
	for i, r := range ranks {
		at := cuda.Ptr(i * word)
		for j := range ranks {
			if j == i {
				continue
			}
			if err := r.stream.Copy(sums[j].Ptr()+at, sums[i].Ptr()+at, word); err != nil {
				return nil, err
			}
		}
	}
	if err := synchronize(ranks); err != nil {
		return nil, err
	}
	norms = make([]float64, len(ranks))
	for i, r := range ranks {
		norm := sums[i].Ptr() + cuda.Ptr(len(ranks)*word)
		if err := r.launch(modules[i], rootOfSum, sums[i].Ptr(), uint64(len(ranks)), norm); err != nil {
			return nil, err
		}
		if norms[i], err = r.number(norm); err != nil {
			return nil, err
		}
	}
	return norms, nil
}

func synchronize(ranks []rank) error {
	for _, r := range ranks {
		if err := r.stream.Synchronize(); err != nil {
			return err
		}
	}
	return nil
}

// The kernels of norm.ptx, and what the software driver runs in their place.
const (
	sumOfSquares = "sample_sum_of_squares"
	rootOfSum    = "sample_root_of_sum"
)

//go:embed norm.ptx
var normText []byte

func init() {
	sim.RegisterKernel(sumOfSquares, func(k *sim.Kernel) {
		x, n, out := sim.Param[uint64](k, 0), sim.Param[uint64](k, 1), sim.Param[uint64](k, 2)
		sum := sim.Load[float64](k, out, 1)[0]
		for _, v := range sim.Load[float32](k, x, int(n)) {
			sum += float64(v) * float64(v)
		}
		sim.Store(k, out, []float64{sum})
	})
	sim.RegisterKernel(rootOfSum, func(k *sim.Kernel) {
		sum := 0.0
		for _, v := range sim.Load[float64](k, sim.Param[uint64](k, 0), int(sim.Param[uint64](k, 1))) {
			sum += v
		}
		sim.Store(k, sim.Param[uint64](k, 2), []float64{math.Sqrt(sum)})
	})
}
