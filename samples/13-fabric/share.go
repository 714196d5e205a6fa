package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

// again returns this program as the other process, on the same machine.
func again(ctx context.Context, e *app.Env, o options, role string, args ...string) (*exec.Cmd, error) {
	return e.Again(ctx, role, append([]string{"-folder", o.folder, "-channel", fmt.Sprint(o.channel)}, args...)...)
}

// byText offers the array as text, and leases it until the other process prints its
// receipt.
func byText(ctx context.Context, e *app.Env, array *vmm.Array[int32], o options) (err error) {
	lease, err := handles.LeaseArray(array, handles.LeaseOptions{Receivers: 1, Timeout: limit})
	if err != nil {
		return err
	}
	defer app.Close(lease, &err)
	text, err := lease.Offer().MarshalText()
	if err != nil {
		return err
	}
	e.Line("offer", "%v", lease.Offer())
	cmd, err := again(ctx, e, o, "importer", "-offer", string(text))
	if err != nil {
		return err
	}
	cmd.Stdout = nil
	said, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	for lines := bufio.NewScanner(said); err == nil && lines.Scan(); {
		mark, rest, _ := strings.Cut(lines.Text(), " ")
		if mark != "receipt" {
			fmt.Fprintln(e.Out, lines.Text())
			continue
		}
		var r handles.Receipt
		if err = r.UnmarshalText([]byte(strings.TrimSpace(rest))); err == nil {
			err = lease.Imported(r)
			e.Line("receipt", "from %v", r.Importer)
		}
	}
	if err := errors.Join(err, cmd.Wait()); err != nil {
		return err
	}
	return lease.Wait(ctx)
}

// take is the other process, which has nothing but the text.
func take(e *app.Env, text string) (err error) {
	var offer handles.Offer
	if err := offer.UnmarshalText([]byte(text)); err != nil {
		return err
	}
	array, err := handles.ImportArray[int32](e.Device, offer, handles.ImportOptions{})
	if err != nil {
		return err
	}
	defer app.Close(array, &err)
	if err := double(e, array); err != nil {
		return err
	}
	receipt, err := offer.Receipt().MarshalText()
	if err == nil {
		e.Line("receipt", "%s", receipt)
	}
	return err
}

// byDescriptor sends the array over a connection that the other process inherits.
func byDescriptor(ctx context.Context, e *app.Env, array *vmm.Array[int32], o options) error {
	conn, far, err := peer.Pair(peer.Options{})
	if err != nil {
		return err
	}
	cmd, err := again(ctx, e, o, "receiver")
	if err != nil {
		return errors.Join(err, conn.Close(), far.Close())
	}
	cmd.ExtraFiles = []*os.File{far}
	if err := errors.Join(cmd.Start(), far.Close()); err != nil {
		return errors.Join(err, conn.Close())
	}
	err = handles.SendArray(ctx, conn, array)
	return errors.Join(err, conn.Close(), cmd.Wait())
}

// receive is the other process, if descriptors are used.
func receive(ctx context.Context, e *app.Env) (err error) {
	conn, err := peer.Inherit(os.NewFile(3, "exporter"), peer.Options{})
	if err != nil {
		return err
	}
	defer app.Close(conn, &err)
	array, err := handles.ReceiveArray[int32](ctx, conn, e.Device, handles.ImportOptions{})
	if err != nil {
		return err
	}
	defer app.Close(array, &err)
	return double(e, array)
}

func double(e *app.Env, array *vmm.Array[int32]) error {
	numbers := make([]int32, array.Len())
	if err := array.All().CopyTo(nil, numbers); err != nil {
		return err
	}
	for i := range numbers {
		numbers[i] *= 2
	}
	e.Line("imported", "%d elements at %v, in process %d", len(numbers), array.Ptr(), os.Getpid())
	return array.All().CopyFrom(nil, numbers)
}
