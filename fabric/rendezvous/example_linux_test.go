package rendezvous_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	"github.com/cuvmm/cuvmm/fabric/rendezvous"
)

// Processes of one host meet at a socket.
func ExampleHost() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	job := rendezvous.Options{Timeout: time.Minute}
	host, path, err := rendezvous.Host(filepath.Join(dir, "job"), "", 2, job)
	if err != nil {
		log.Fatal(err)
	}
	defer host.Close()

	done := make(chan struct{})
	go func() { // as another process would
		defer close(done)
		member, err := rendezvous.Join(context.Background(), path, 1, 2, job)
		if err != nil {
			log.Fatal(err)
		}
		defer member.Close()
		if err := member.Barrier(context.Background(), "ready"); err != nil {
			log.Fatal(err)
		}
	}()
	if err := host.Barrier(context.Background(), "ready"); err != nil {
		log.Fatal(err)
	}
	<-done
	fmt.Println("rank", host.Rank(), "of", host.Size(), "is ready")
	// Output: rank 0 of 2 is ready
}
