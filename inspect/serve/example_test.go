package serve_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"os"

	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/inspect/serve"
)

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// A program offers its map to programs of the same user: cuvmm map, cuvmm top, or one's
// own.
func ExampleOffer() {
	folder, err := os.MkdirTemp("", "example")
	check(err)
	defer os.RemoveAll(folder)
	check(os.Setenv("XDG_RUNTIME_DIR", folder)) // systems with a session have set it
	sys, err := auto.Open(auto.Options{Driver: auto.Software})
	check(err)
	defer sys.Close()
	offered, err := serve.Offer(sys)
	check(err)
	defer offered.Close()

	// Another process.
	found, err := serve.Find(context.Background())
	check(err)
	show := func(s serve.Socket) {
		snapshot, err := s.Snapshot(context.Background())
		check(err)
		fmt.Println(s.PID == os.Getpid(), snapshot.Driver)
	}
	for _, s := range found {
		show(s)
	}
	// Output:
	// true software driver, CUDA 13.0
}

// A program with an HTTP server for its operators mounts the handler there.
func ExampleHandler() {
	sys, err := auto.Open(auto.Options{Driver: auto.Software})
	check(err)
	defer sys.Close()
	mux := http.NewServeMux()
	mux.Handle("/debug/cuvmm/", serve.Handler(sys))
	server := httptest.NewServer(mux)
	defer server.Close()

	response, err := http.Get(server.URL + "/debug/cuvmm/snapshot")
	check(err)
	defer response.Body.Close()
	fmt.Println(response.Status, response.Header.Get("Content-Type"))
	// Output:
	// 200 OK application/json
}

// A program that can be taken off the GPU stops its work when it is asked to.
func ExampleOfferSleep() {
	folder, err := os.MkdirTemp("", "example")
	check(err)
	defer os.RemoveAll(folder)
	check(os.Setenv("XDG_RUNTIME_DIR", folder))
	sys, err := auto.Open(auto.Options{Driver: auto.Software})
	check(err)
	defer sys.Close()
	offered, err := serve.OfferSleep(sys, serve.SleepOptions{
		Before: func(context.Context) error { fmt.Println("no more requests"); return nil },
		After:  func(context.Context) error { fmt.Println("requests are served again"); return nil },
	})
	check(err)
	defer offered.Close()

	// Another process: cuvmm sleep makes these requests, and has the driver take the rest.
	found, err := serve.Find(context.Background())
	check(err)
	blockers, err := found[0].Prepare(context.Background())
	check(err)
	show := func(b serve.Blocker) { fmt.Println(b.What+":", b.Remedy) }
	for _, b := range blockers {
		show(b)
	}
	bytes, err := found[0].Suspend(context.Background())
	check(err)
	fmt.Println(bytes, "bytes were given back")
	check(found[0].Wake(context.Background()))
	// Output:
	// no more requests
	// 0 bytes were given back
	// requests are served again
}
