package vmm_test

import (
	"fmt"

	"github.com/cuvmm/cuvmm/vmm"
)

// A network card gets a descriptor of a part of a buffer.
func ExampleDMABufOptions() {
	dev, done := firstDevice()
	defer done()
	buffer, err := vmm.NewBuffer(dev, vmm.BufferOptions{Chunks: vmm.FixedChunks(2 << 20)})
	fatal(err)
	defer buffer.Close()
	_, err = buffer.AppendUndefined(4 << 20)
	fatal(err)

	file, err := buffer.DMABuf(0, 2<<20, vmm.DMABufOptions{PCIe: true})
	fatal(err)
	defer file.Close()
	fmt.Println("a file of kind", file.Name())
	// Output:
	// a file of kind dmabuf
}
