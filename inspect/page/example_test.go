package page_test

import (
	"bytes"
	"fmt"
	"log"
	"strings"

	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/page"
)

// A page is one file, which shows the map in any browser.
func ExampleWrite() {
	sys, err := auto.Open(auto.Options{Driver: auto.Software})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	s, err := inspect.Take(sys)
	if err != nil {
		log.Fatal(err)
	}
	var file bytes.Buffer
	if err := page.Write(&file, s); err != nil {
		log.Fatal(err)
	}
	fmt.Println(strings.HasPrefix(file.String(), "<!doctype html>"))
	// Output:
	// true
}
