package torch_test

import (
	"bytes"
	"fmt"
	"log"

	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/torch"
)

// PyTorch's memory viewer opens what is written.
func ExampleWrite() {
	sys, err := auto.Open(auto.Options{Driver: auto.Software})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	s, err := inspect.Take(sys)
	if err != nil {
		log.Fatal(err)
	}
	var file bytes.Buffer
	if err := torch.Write(&file, s); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("a pickle of protocol %d\n", file.Bytes()[1])
	// Output:
	// a pickle of protocol 4
}
