package vmm_test

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm"
)

// A buffer and an allocation share a limit. The error says who has the memory.
func ExampleCreateWithin() {
	dev, done := firstDevice()
	defer done()
	budget := cuda.NewBudget(6<<20, cuda.BudgetOptions{Name: "model"})
	weights, err := vmm.NewBuffer(dev, vmm.BufferOptions{Name: "weights", Budget: budget, Chunks: vmm.FixedChunks(2 << 20)})
	fatal(err)
	defer weights.Close()
	fatal(weights.Grow(4 << 20))

	_, err = vmm.CreateWithin(budget, dev, 4<<20, vmm.Properties{})
	var failure *cuda.Error
	if errors.Is(err, cuda.ErrBudget) && errors.As(err, &failure) {
		fmt.Println(failure.Asked)
	}
	// Output:
	// 4 MiB of budget "model", which has 4 MiB of 6 MiB committed: buffer "weights" 4 MiB
}
