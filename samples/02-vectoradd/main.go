// Command 02-vectoradd adds vectors that lie on all GPUs at once: one range of
// addresses, behind which each device in turn has a chunk of memory. Each
// device adds the part that it owns; the first one then reads all of it.
//
//	go run ./samples/02-vectoradd [-driver auto|real|sim]
//
// One GPU is enough. The software driver shows two.
package main

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "02-vectoradd:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("02-vectoradd", flag.ContinueOnError)
	driver := flags.String("driver", "", "`auto`, real or sim (default: $CUVMM_DRIVER, or auto)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("argument %q: only flags are taken", flags.Arg(0))
	}
	sys, err := auto.Open(auto.Options{
		Driver:  auto.Choice(*driver),
		Machine: sim.Options{Devices: make([]sim.DeviceOptions, 2)},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	fmt.Fprintf(out, "driver     %v\n", sys.Driver())
	return add(sys.Devices(), out)
}

// rounds is how many chunks of each vector every device has.
const rounds = 2

// add makes the range, has each device add its part, and checks the sums.
func add(devices []*cuda.Device, out io.Writer) (err error) {
	together, err := allReachAll(devices)
	if err != nil {
		return err
	}
	chunk, err := granularity(devices)
	if err != nil {
		return err
	}
	perVector := rounds * len(devices)
	r, err := vmm.Reserve(devices[0], 3*perVector*chunk, vmm.ReserveOptions{Align: chunk})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	fmt.Fprintf(out, "range      %v, %d MiB: the vectors a, b and c, %d chunks each\n", r.Ptr(), r.Size()>>20, perVector)

	// A vector has as many chunks of each device as of any other, so chunk i of
	// a, of b and of c are on one device.
	var grants []vmm.Access
	for _, d := range devices {
		grants = append(grants, vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite})
	}
	var mappings []*vmm.Mapping
	defer func() {
		for _, m := range mappings {
			err = errors.Join(err, m.Close())
		}
	}()
	for i := range 3 * perVector {
		m, err := place(r, i*chunk, devices[i%len(devices)], chunk)
		if err != nil {
			return err
		}
		mappings = append(mappings, m)
		if !together {
			if err := m.SetAccess(grants[i%len(devices)]); err != nil {
				return err
			}
		}
	}
	if together {
		// One call for the whole range: one for each chunk costs far more.
		if err := r.SetAccess(0, r.Size(), grants...); err != nil {
			return err
		}
		fmt.Fprintln(out, "access     every device to everything, granted in one call")
	} else {
		fmt.Fprintln(out, "access     each device to what it owns, since they cannot reach one another")
	}

	adders := make([]*adder, len(devices))
	for i, d := range devices {
		if adders[i], err = newAdder(d); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, adders[i].close()) }()
		fmt.Fprintf(out, "owner      %v: chunks", d)
		for c := i; c < perVector; c += len(devices) {
			fmt.Fprintf(out, " %d", c)
		}
		fmt.Fprintln(out, " of each vector")
	}
	at := func(vector, i int) cuda.Ptr { return r.Ptr() + cuda.Ptr((vector*perVector+i)*chunk) }
	words := chunk / 4
	for i := range perVector {
		a, b := values(i*words, words)
		if err := adders[i%len(devices)].add(at(0, i), at(1, i), at(2, i), a, b); err != nil {
			return err
		}
	}
	for _, ad := range adders {
		if err := ad.stream.Synchronize(); err != nil {
			return err
		}
	}

	reader := adders[0]
	back, c := make([]byte, chunk), make([]float32, words)
	for i := range perVector {
		if !together {
			reader = adders[i%len(devices)]
		}
		if err := reader.stream.Download(back, at(2, i)); err != nil {
			return err
		}
		if _, err := binary.Decode(back, binary.NativeEndian, c); err != nil {
			return err
		}
		a, b := values(i*words, words)
		for j := range c {
			if c[j] != a[j]+b[j] {
				return fmt.Errorf("c[%d] is %v, not %v + %v", i*words+j, c[j], a[j], b[j])
			}
		}
	}
	_, err = fmt.Fprintf(out, "verified   c = a + b in %d elements\n", perVector*words)
	return err
}

// place puts memory of a device into the range. The mapping keeps it alive.
func place(r *vmm.Reservation, off int, on *cuda.Device, size int) (*vmm.Mapping, error) {
	memory, err := vmm.Create(on, size, vmm.Properties{})
	if err != nil {
		return nil, err
	}
	m, err := r.Map(off, memory)
	return m, errors.Join(err, memory.Close())
}

// allReachAll reports whether each device can use the memory of all others.
func allReachAll(devices []*cuda.Device) (bool, error) {
	for _, d := range devices {
		for _, other := range devices {
			if ok, err := d.CanAccess(other); err != nil || !ok {
				return false, err
			}
		}
	}
	return true, nil
}

// granularity is a size of chunks that suits every device.
func granularity(devices []*cuda.Device) (chunk int, err error) {
	for _, d := range devices {
		g, err := vmm.GranularityOf(d, vmm.Properties{})
		if err != nil {
			return 0, err
		}
		chunk = max(chunk, g) // both are powers of two
	}
	return chunk, nil
}

// values are n elements of a and b, from the first on.
func values(first, n int) (a, b []float32) {
	a, b = make([]float32, n), make([]float32, n)
	for i := range n {
		a[i], b[i] = float32(first+i), float32((first+i)%1000)/8
	}
	return a, b
}

// adder is the kernel on one device, and a stream to run it on.
type adder struct {
	stream *cuda.Stream
	module *cuda.Module
	kernel *cuda.Kernel
}

func newAdder(d *cuda.Device) (*adder, error) {
	module, err := d.LoadModule(kernels.Basic)
	if err != nil {
		return nil, err
	}
	kernel, err := module.Kernel(kernels.VectorAdd)
	if err != nil {
		return nil, errors.Join(err, module.Close())
	}
	stream, err := d.NewStream(cuda.StreamOptions{})
	if err != nil {
		return nil, errors.Join(err, module.Close())
	}
	return &adder{stream, module, kernel}, nil
}

// add uploads a and b and adds them, as work on the stream.
func (ad *adder) add(pa, pb, pc cuda.Ptr, a, b []float32) error {
	if err := errors.Join(ad.upload(pa, a), ad.upload(pb, b)); err != nil {
		return err
	}
	return ad.kernel.Launch(ad.stream, cuda.Threads(len(a)), pa, pb, pc, uint64(len(a)))
}

func (ad *adder) upload(to cuda.Ptr, v []float32) error {
	bytes, err := binary.Append(nil, binary.NativeEndian, v)
	if err != nil {
		return err
	}
	return ad.stream.Upload(to, bytes)
}

func (ad *adder) close() error { return errors.Join(ad.stream.Close(), ad.module.Close()) }
