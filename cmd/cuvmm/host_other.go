//go:build !unix

package main

import (
	"math"
	"os"
)

// limitOf returns what stands for no limit: there are none of this kind here.
func limitOf(resource) (uint64, error) { return math.MaxUint64, nil }

func readAndWrite(path string) error {
	_, err := os.Stat(path)
	return err
}
