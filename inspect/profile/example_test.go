package profile_test

import (
	"bytes"
	"fmt"
	"log"

	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/profile"
)

// A profile is read by go tool pprof.
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
	if err := profile.Write(&file, s); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("compressed: %x\n", file.Bytes()[:2])
	// Output:
	// compressed: 1f8b
}
