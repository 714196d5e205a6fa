// Command 10-ipc shares GPU memory with a child process while it grows. The
// parent streams a file into an array. The child follows the array in a mapping of
// its own, hashes what arrives, and writes the SHA-256 into an array that the parent
// published for the reply. No byte of the file goes through a pipe.
//
//	go run ./samples/10-ipc [-driver auto|real|sim] [-step SIZE] [FILE]
//
// Without a file it reads its own executable.
package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"time"

	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

var sample = app.Sample{
	Name:  "10-ipc",
	Shows: "an array that another process follows while it grows",
	Next:  "11-ipc-server: a publisher and any number of followers",
	Arg:   "FILE",
	Run:   run,
}

func main() { app.Main(sample) }

// The names under which the two processes find each other's memory.
const (
	fileName  = "file"
	replyName = "reply"
)

func run(e *app.Env) (err error) {
	step := e.Size("step", "1MiB", "how much to read at a time: a `size` such as 64KiB")
	if err := e.Open(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(e.Context, 5*time.Minute)
	defer cancel()
	if e.Role == "follower" {
		return follow(ctx, e)
	}
	name := e.Arg
	if name == "" {
		if name, err = os.Executable(); err != nil {
			return err
		}
	}
	in, err := os.Open(name)
	if err != nil {
		return err
	}
	defer app.Close(in, &err)
	e.Line("input", "%s", name)

	array, err := vmm.NewArray[byte](e.Device, vmm.BufferOptions{})
	if err != nil {
		return err
	}
	defer app.Close(array, &err)
	reply, err := vmm.NewArray[byte](e.Device, vmm.BufferOptions{Reserve: sha256.Size})
	if err != nil {
		return err
	}
	defer app.Close(reply, &err)
	if err := reply.Resize(nil, sha256.Size); err != nil {
		return err
	}
	server := publish.NewServer(publish.ServerOptions{})
	defer app.Close(server, &err)
	file, err := publish.Array(server, fileName, array)
	if err != nil {
		return err
	}
	place, err := publish.Array(server, replyName, reply)
	if err != nil {
		return err
	}
	if err := place.Announce(ctx, sha256.Size, nil); err != nil {
		return err
	}
	e.Line("parent", "process %d, the array is at %v", os.Getpid(), array.Ptr())
	want, err := serve(ctx, e, server, in, *step, array, file)
	if err != nil {
		return err
	}
	got := make([]byte, sha256.Size)
	if err := reply.All().CopyTo(nil, got); err != nil {
		return err
	}
	e.Line("reply", "%x", got)
	if string(got) != string(want) {
		return fmt.Errorf("the child found SHA-256 %x, the input has %x", got, want)
	}
	e.Line("verified", "the child's mapping has the input's SHA-256")
	return nil
}
