// Command 13-fabric shares a GPU array between two processes by a text: one makes
// the array and passes its offer to the other as an argument; they have no
// connection but the other's output. Over an NVLink fabric they may run on two
// hosts. If fabric handles do not work here the sample says why, and shares by file
// descriptor, which works within one host.
//
//	go run ./samples/13-fabric [-driver auto|real|sim]
//	go run ./samples/13-fabric -diagnose     what stands in the way, and what to do
//
// On the software driver both processes are on the machine of one folder, with
// channel 0 of its fabric open (-channel -1 leaves it closed).
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cuvmm/cuvmm/fabric"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

var sample = app.Sample{
	Name:  "13-fabric",
	Shows: "memory shared by a text, on one host or over an NVLink fabric",
	Next:  "14-multicast: one address for the memory of several GPUs",
	Run:   run,
}

func main() { app.Main(sample) }

const (
	limit    = time.Minute // for the other process
	elements = 1000
)

// options are the flags, which the other process gets too.
type options struct {
	folder  string
	channel int
	offer   string
}

func run(e *app.Env) (err error) {
	var o options
	e.Flags.StringVar(&o.folder, "folder", "", "the software machine's `folder` (default: a new one)")
	e.Flags.IntVar(&o.channel, "channel", 0, "the software fabric's open `channel`, -1 for none")
	e.Flags.StringVar(&o.offer, "offer", "", "the `text` of the offer (for the other process)")
	diagnose := e.Flags.Bool("diagnose", false, "say what stands between this process and fabric handles")
	if err := e.Parse(); err != nil {
		return err
	}
	if o.folder == "" {
		if o.folder, err = os.MkdirTemp("", "cuvmm-fabric"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(o.folder)) }()
	}
	e.Machine.Folder = o.folder
	if o.channel >= 0 {
		e.Machine.Fabric.Channels = []int{o.channel}
	}
	if err := e.Open(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(e.Context, limit)
	defer cancel()
	switch {
	case e.Role == "importer":
		return take(e, o.offer)
	case e.Role == "receiver":
		return receive(ctx, e)
	case *diagnose:
		d, err := fabric.Diagnose(fabric.Options{Trial: true}, e.System.Devices()...)
		if err != nil {
			return err
		}
		fmt.Fprintln(e.Out, d)
		e.Line("works", "fabric handles work: %v", d.Works())
		return nil
	}
	return export(ctx, e, o)
}

// export makes the array, shares it, and checks what the other process did to it.
func export(ctx context.Context, e *app.Env, o options) (err error) {
	array, err := vmm.NewArray[int32](e.Device, vmm.BufferOptions{Reserve: 4 * elements, Memory: vmm.Properties{Handles: vmm.PreferFabric}})
	if err != nil {
		return err
	}
	defer app.Close(array, &err)
	numbers := make([]int32, elements)
	for i := range numbers {
		numbers[i] = int32(i)
	}
	if _, err := array.Append(nil, numbers); err != nil {
		return err
	}
	if array.Buffer().Requested().Handles&vmm.Fabric != 0 {
		err = byText(ctx, e, array, o)
	} else {
		p, probed := e.Device.Probe()
		if probed != nil {
			return probed
		}
		e.Line("fallback", "descriptors, within this host, since fabric handles do not work here:\n           %v", p.FabricError)
		err = byDescriptor(ctx, e, array, o)
	}
	if err != nil {
		return err
	}
	if err := array.All().CopyTo(nil, numbers); err != nil {
		return err
	}
	for i, n := range numbers {
		if n != 2*int32(i) {
			return fmt.Errorf("element %d is %d: the other process did not double it", i, n)
		}
	}
	e.Line("verified", "the other process doubled all %d elements", elements)
	return nil
}
