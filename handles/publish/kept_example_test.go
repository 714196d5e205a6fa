//go:build linux

package publish_test

import (
	"context"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/vmm"
)

// A process keeps memory and its page for publishers that come and go, here one after the other. A broker does that
// for processes that may be killed: see Client.Keep in package broker.
func ExampleNewPage() {
	machine, err := sim.New(sim.Options{})
	check(err)
	sys, err := machine.OpenOwned(cuda.Options{})
	check(err)
	defer sys.Close()
	memory, err := vmm.NewBuffer(sys.Devices()[0], vmm.BufferOptions{})
	check(err)
	check(memory.Resize(nil, 1<<20))
	file, err := publish.NewPageFile()
	check(err)
	page := publish.NewPage([16]byte{1}, memory, file)

	ctx := context.Background()
	publisher := func(options publish.PublishOptions) {
		server := publish.NewServer(publish.ServerOptions{})
		p, err := server.Publish("weights", memory, options)
		if err != nil {
			fmt.Println(err)
		} else {
			fmt.Println("something is shown:", p.Stats().Generation > 0, "to be rewritten:", p.Stats().Rewriting)
			check(p.Announce(ctx, memory.Len()))
			check(p.Rewrite(ctx, publish.RewriteOptions{})) // and ends
		}
		check(server.Close())
	}
	publisher(publish.PublishOptions{Page: page})
	publisher(publish.PublishOptions{Page: page})
	publisher(publish.PublishOptions{Page: page, Incomplete: true})
	check(page.Close())
	check(memory.Close())
	// Output:
	// something is shown: false to be rewritten: false
	// publish.Server.Publish: partly rewritten: memory that was being rewritten when its publisher ended, or whose publication was withdrawn; PublishOptions.Incomplete publishes it to be written anew
	// something is shown: true to be rewritten: true
}
