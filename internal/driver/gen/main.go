// Gen makes what follows from the table of entry points, which is the interface
// in driver.go with the directives over its methods: the constants of the calls,
// csrc's C declarations, C wrappers and Go
// methods, and the exports of cmd/libcuda. It also makes the C table of results' names.
// The package document of internal/driver describes a row.
//
// It runs in the folder of internal/driver, by go generate.
package main

import (
	"fmt"
	"os"
)

func main() {
	if err := run("."); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

func run(dir string) error {
	t, err := readTable(dir)
	if err != nil {
		return err
	}
	if err := t.readHandExports(dir + "/../../cmd/libcuda"); err != nil {
		return err
	}
	files, err := t.generate()
	if err != nil {
		return err
	}
	for path, src := range files {
		if err := os.WriteFile(dir+"/"+path, src, 0o644); err != nil {
			return err
		}
	}
	return nil
}
