package main

import (
	"flag"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/cuvmm/cuvmm/inspect"
)

const versionUsage = `usage: cuvmm version

Prints the version of cuvmm, what it was built with, and the version of the snapshots
that it reads and writes.
`

func printVersion(*flag.FlagSet) func(args []string, out io.Writer, h host) (int, error) {
	return func(_ []string, out io.Writer, _ host) (int, error) {
		fmt.Fprintf(out, "cuvmm %s, %s, %s/%s, snapshots of version %d\n", version(), runtime.Version(), runtime.GOOS, runtime.GOARCH, inspect.Version)
		return exitOK, nil
	}
}

// version returns the version of this program.
func version() string {
	about, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	text := about.Main.Version
	for _, s := range about.Settings {
		if s.Key == "vcs.revision" || s.Key == "vcs.modified" {
			text += " " + s.Value
		}
	}
	return text
}
