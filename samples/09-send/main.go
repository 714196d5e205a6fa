// Command 09-send sends an array to another process, which works on the same
// memory: no byte of it is copied. The sample starts the other process itself, as
// its child, with one end of a connection.
//
//	go run ./samples/09-send [-driver auto|real|sim]
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

var sample = app.Sample{
	Name:  "09-send",
	Shows: "memory that another process receives once, and works on in place",
	Next:  "10-ipc: an array that another process follows while it grows",
	Run:   run,
}

func main() { app.Main(sample) }

const (
	elements = 1000
	limit    = time.Minute // for the other process
)

func run(e *app.Env) (err error) {
	if err := e.Open(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(e.Context, limit)
	defer cancel()
	if e.Role == "receiver" {
		return receive(ctx, e)
	}
	array, err := vmm.NewArray[int32](e.Device, vmm.BufferOptions{})
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
	if err := send(ctx, e, array); err != nil {
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

// send starts the other process and sends it the array. It returns when that
// process has ended.
func send(ctx context.Context, e *app.Env, array *vmm.Array[int32]) error {
	conn, far, err := peer.Pair(peer.Options{})
	if err != nil {
		return err
	}
	cmd, err := e.Again(ctx, "receiver")
	if err != nil {
		return errors.Join(err, conn.Close(), far.Close())
	}
	cmd.ExtraFiles = []*os.File{far} // file 3 of the other process
	if err := errors.Join(cmd.Start(), far.Close()); err != nil {
		return errors.Join(err, conn.Close())
	}
	e.Line("sender", "process %d, %d elements at %v", os.Getpid(), array.Len(), array.Ptr())
	err = handles.SendArray(ctx, conn, array)
	// The other process holds the memory by now, or has said why not. Closing the
	// connection ends its wait if the array never went out.
	return errors.Join(err, conn.Close(), cmd.Wait())
}

// receive is the other process.
func receive(ctx context.Context, e *app.Env) (err error) {
	conn, err := peer.Inherit(os.NewFile(3, "sender"), peer.Options{})
	if err != nil {
		return err
	}
	defer app.Close(conn, &err)
	array, err := handles.ReceiveArray[int32](ctx, conn, e.Device, handles.ImportOptions{})
	if err != nil {
		return err
	}
	defer app.Close(array, &err)
	e.Line("receiver", "process %d, %d elements at %v", os.Getpid(), array.Len(), array.Ptr())
	numbers := make([]int32, array.Len())
	if err := array.All().CopyTo(nil, numbers); err != nil {
		return err
	}
	for i := range numbers {
		numbers[i] *= 2
	}
	return array.All().CopyFrom(nil, numbers)
}
