//go:build !unix

package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
)

const (
	serveUsage = "usage: cuvmm serve\n\nKeeps GPU memory for other processes. It needs Linux.\n\nFlags:\n"
	brokerRole = "broker"
	copyRole   = "broker-copy"
)

func serveObjects(*flag.FlagSet) func([]string, io.Writer, host) (int, error) {
	return func([]string, io.Writer, host) (int, error) {
		return exitFailed, fmt.Errorf("serve: file descriptors travel between processes on Linux only: %w", errors.ErrUnsupported)
	}
}

var runBroker, runCopy = serveObjects, serveObjects
