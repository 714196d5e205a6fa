// Command 13-fabric shares a GPU array between two processes by a text: the one
// makes the array, and gives the other its offer as an argument, with no
// connection between them but what the other prints. Over an NVLink fabric the
// two may be on two hosts. Where fabric handles do not work here it says why, and
// shares by descriptor, which serves one host.
//
//	go run ./samples/13-fabric [-driver auto|real|sim]
//	go run ./samples/13-fabric -diagnose     what stands in the way, and what to do
//
// On the software driver both are on the machine of one folder, with channel 0
// of its fabric open (-channel -1 leaves it closed).
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/vmm"
)

// limit is how long the other process may take.
const limit = time.Minute

// elements of the array.
const elements = 1000

// receiptMark begins the line on which the importer says that it has imported.
const receiptMark = "receipt    "

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "13-fabric:", err)
		os.Exit(1)
	}
}

// options are the program's arguments.
type options struct {
	driver, folder string
	channel        int
	offer          string
	diagnose       bool
	inherit        bool
}

func run(args []string, out io.Writer) (err error) {
	var o options
	flags := flag.NewFlagSet("13-fabric", flag.ContinueOnError)
	flags.StringVar(&o.driver, "driver", "", "`auto`, real or sim (default: $CUVMM_DRIVER, or auto)")
	flags.StringVar(&o.folder, "folder", "", "the software machine's `folder` (default: one of its own)")
	flags.IntVar(&o.channel, "channel", 0, "the software fabric's open `channel`, -1 for none")
	flags.BoolVar(&o.diagnose, "diagnose", false, "say what stands between this process and fabric handles")
	flags.StringVar(&o.offer, "import", "", "import the array that this `text` offers (the exporter says so)")
	flags.BoolVar(&o.inherit, "inherit", false, "receive the array from the parent (the exporter says so)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	// An interrupt ends the wait for the other process, and the folder goes.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if o.folder == "" {
		if o.folder, err = os.MkdirTemp("", "cuvmm-fabric"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(o.folder)) }()
	}
	machine := sim.Options{Folder: o.folder}
	if o.channel >= 0 {
		machine.Fabric.Channels = []int{o.channel}
	}
	sys, err := auto.Open(auto.Options{Driver: auto.Choice(o.driver), Machine: machine})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	dev, err := sys.Device(0)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	switch {
	case o.diagnose:
		d, err := fabric.Diagnose(fabric.Options{Trial: true}, sys.Devices()...)
		if err != nil {
			return err
		}
		fmt.Fprintln(out, d)
		_, err = fmt.Fprintf(out, "fabric handles work: %v\n", d.Works())
		return err
	case o.offer != "":
		return take(dev, o.offer, out)
	case o.inherit:
		return receive(ctx, dev, out)
	}
	fmt.Fprintf(out, "driver     %v\n", sys.Driver())
	return export(ctx, dev, o, out)
}

// export is the process whose array it is.
func export(ctx context.Context, dev *cuda.Device, o options, out io.Writer) (err error) {
	array, err := vmm.NewArray[int32](dev, vmm.BufferOptions{Reserve: 4 * elements, Memory: vmm.Properties{Handles: vmm.PreferFabric}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, array.Close()) }()
	numbers := make([]int32, elements)
	for i := range numbers {
		numbers[i] = int32(i)
	}
	if _, err := array.Append(nil, numbers); err != nil {
		return err
	}
	if array.Buffer().Requested().Handles&vmm.Fabric != 0 {
		err = byText(ctx, array, o, out)
	} else {
		p, probed := dev.Probe()
		if probed != nil {
			return probed
		}
		fmt.Fprintf(out, "fallback   descriptors, within this host, since fabric handles do not work here:\n           %v\n", p.FabricError)
		err = byDescriptor(ctx, array, o, out)
	}
	if err != nil {
		return err
	}
	if err := array.All().CopyTo(nil, numbers); err != nil {
		return err
	}
	for i, n := range numbers {
		if n != 2*int32(i) {
			return fmt.Errorf("element %d is %d, which the other process was to double", i, n)
		}
	}
	_, err = fmt.Fprintf(out, "verified   the other process doubled all %d elements\n", elements)
	return err
}

// byText offers the array as text, and keeps it leased until the receipt is
// there.
func byText(ctx context.Context, array *vmm.Array[int32], o options, out io.Writer) (err error) {
	lease, err := handles.LeaseArray(array, handles.LeaseOptions{Receivers: 1, Timeout: limit})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lease.Close()) }()
	text, err := lease.Offer().MarshalText()
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "offer      %v\n", lease.Offer())
	cmd, err := again(ctx, o, "-import", string(text))
	if err != nil {
		return err
	}
	said, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	for lines := bufio.NewScanner(said); lines.Scan(); {
		line := lines.Text()
		if receipt, is := strings.CutPrefix(line, receiptMark); is {
			var r handles.Receipt
			if err = r.UnmarshalText([]byte(receipt)); err == nil {
				err = lease.Imported(r)
			}
			if err != nil {
				break
			}
			line = fmt.Sprintf("%sfrom %v", receiptMark, r.Importer)
		}
		fmt.Fprintln(out, line)
	}
	if err := errors.Join(err, cmd.Wait()); err != nil {
		return err
	}
	return lease.Wait(ctx)
}

// byDescriptor sends the array over a connection that the child inherits.
func byDescriptor(ctx context.Context, array *vmm.Array[int32], o options, out io.Writer) (err error) {
	conn, far, err := peer.Pair(peer.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	cmd, err := again(ctx, o, "-inherit")
	if err != nil {
		return errors.Join(err, far.Close())
	}
	cmd.Stdout, cmd.ExtraFiles = out, []*os.File{far}
	if err := errors.Join(cmd.Start(), far.Close()); err != nil {
		return err
	}
	sent := handles.SendArray(ctx, conn, array)
	if sent != nil {
		_ = conn.Close() // so that the other process does not wait
	}
	return errors.Join(sent, cmd.Wait())
}

// again is this program as the other process.
func again(ctx context.Context, o options, args ...string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, append([]string{"-driver", o.driver, "-folder", o.folder, "-channel", fmt.Sprint(o.channel)}, args...)...)
	cmd.Stderr = os.Stderr
	return cmd, nil
}

// take is the other process, which has nothing but the text.
func take(dev *cuda.Device, text string, out io.Writer) error {
	var offer handles.Offer
	if err := offer.UnmarshalText([]byte(text)); err != nil {
		return err
	}
	array, err := handles.ImportArray[int32](dev, offer, handles.ImportOptions{})
	if err != nil {
		return err
	}
	if err := double(array, out); err != nil {
		return errors.Join(err, array.Close())
	}
	receipt, err := offer.Receipt().MarshalText()
	if err == nil {
		_, err = fmt.Fprintf(out, "%s%s\n", receiptMark, receipt)
	}
	return errors.Join(err, array.Close())
}

// receive is the other process, where descriptors do.
func receive(ctx context.Context, dev *cuda.Device, out io.Writer) (err error) {
	conn, err := peer.Inherit(os.NewFile(3, "parent"), peer.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	array, err := handles.ReceiveArray[int32](ctx, conn, dev, handles.ImportOptions{})
	if err != nil {
		return err
	}
	return errors.Join(double(array, out), array.Close())
}

func double(array *vmm.Array[int32], out io.Writer) error {
	numbers := make([]int32, array.Len())
	if err := array.All().CopyTo(nil, numbers); err != nil {
		return err
	}
	for i := range numbers {
		numbers[i] *= 2
	}
	fmt.Fprintf(out, "imported   %d elements at %v, in process %d\n", len(numbers), array.Ptr(), os.Getpid())
	return array.All().CopyFrom(nil, numbers)
}
