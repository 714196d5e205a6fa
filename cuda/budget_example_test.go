package cuda_test

import (
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
)

// A server's models share a limit, and each has one of its own. vmm.BufferOptions.Budget and
// pool.Options.Budget take either.
func ExampleNewBudget() {
	server := cuda.NewBudget(60<<30, cuda.BudgetOptions{Name: "server"})
	model := cuda.NewBudget(20<<30, cuda.BudgetOptions{Name: "model", Parent: server})

	remove, err := model.OnPressure(0, func(need int) (freed int) {
		return 0 // evict what is least used, and return its size
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer remove()

	show := func(s cuda.BudgetStats, byTag []cuda.BudgetUse) {
		fmt.Println(s.Name, s.Committed, "of", s.Limit>>30, "GiB committed, by tags:", byTag)
	}
	show(server.Stats(), server.Stats().ByTag())
	fmt.Println(errors.Is(model.SetLimit(-1), cuda.ErrInvalidArgument))
	// Output:
	// server 0 of 60 GiB committed, by tags: []
	// true
}
