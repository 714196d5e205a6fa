package pool_test

import (
	"fmt"
	"log"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm/pool"
)

// A block is taken for a stream, used, and freed at once: the stream's order is
// enough. Another stream that used it is named.
func Example() {
	m, err := sim.New(sim.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	sys, err := m.Open(cuda.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()

	p, err := pool.New(d, pool.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer p.Close()
	first, err := p.Alloc(pool.Request{Bytes: 3 << 20, Stream: s})
	if err != nil {
		log.Fatal(err)
	}
	if err := s.Memset(first.Ptr(), 1, first.Bytes()); err != nil {
		log.Fatal(err)
	}
	if err := p.Free(first); err != nil { // while the GPU still works on it
		log.Fatal(err)
	}
	second, err := p.Alloc(pool.Request{Bytes: 3 << 20, Stream: s})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("the same memory:", first.Ptr() == second.Ptr())
	fmt.Println(p.Free(second))
	fmt.Println("freed twice:", p.Free(second) != nil)
	// Output:
	// the same memory: true
	// <nil>
	// freed twice: true
}
