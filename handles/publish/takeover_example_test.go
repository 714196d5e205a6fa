//go:build linux

package publish_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/publish"
)

// A publisher is killed, and a process that follows it takes its publication over.
func ExampleTakeOver() {
	top, err := os.MkdirTemp("", "example")
	check(err)
	defer os.RemoveAll(top)
	publisher := publisherIn(top) // another process
	sys := openIn(top)
	defer sys.Close()

	ctx := context.Background()
	client, err := publish.Dial(ctx, filepath.Join(top, "sockets", "server"), publish.DialOptions{})
	check(err)
	defer client.Close()
	follower, err := publish.Follow[byte](ctx, client, sys.Devices()[0], "text", publish.FollowOptions{KeepDescriptors: true})
	check(err)
	check(follower.Next(ctx))
	array := follower.Array()
	address := array.Ptr()

	check(publisher.Process.Kill())
	server := publish.NewServer(publish.ServerOptions{})
	text, err := publish.TakeOver(ctx, server, follower, publish.TakeOverOptions{}) // waits for the end of the process
	check(err)

	// The array belongs to this process now, which appends, announces and serves.
	_, err = array.Append(nil, []byte(", and its successor"))
	check(err)
	check(text.Announce(ctx, array.Len()))
	content := make([]byte, array.Len())
	check(array.All().CopyTo(nil, content))
	fmt.Printf("%s, at the same address: %v\n", content, array.Ptr() == address)

	check(server.Close())
	check(array.Close())
	_ = publisher.Wait() // killed
	// Output: the publisher, and its successor, at the same address: true
}

// openIn opens a software machine whose processes share a folder.
func openIn(top string) *cuda.System {
	machine, err := sim.New(sim.Options{Folder: filepath.Join(top, "machine")})
	check(err)
	sys, err := machine.OpenOwned(cuda.Options{})
	check(err)
	return sys
}

const publisherFolder = "CUVMM_EXAMPLE_PUBLISHER"

// publisherIn runs this program again, as a publisher, until it serves.
func publisherIn(top string) *exec.Cmd {
	publisher := exec.Command(os.Args[0])
	publisher.Env = append(os.Environ(), publisherFolder+"="+top)
	publisher.Stderr = os.Stderr
	_, err := publisher.StdinPipe() // closed when this process ends
	check(err)
	out, err := publisher.StdoutPipe()
	check(err)
	check(publisher.Start())
	_, err = bufio.NewReader(out).ReadString('\n')
	check(err)
	return publisher
}

func init() {
	if top := os.Getenv(publisherFolder); top != "" {
		serve(openIn(top).Devices()[0], filepath.Join(top, "sockets"), "the publisher")
		fmt.Println("serves")
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}
}
