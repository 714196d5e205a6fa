// Command cuvmm inspects a machine and its processes: doctor finds what keeps GPU
// virtual memory from working and says what to do, info describes the devices and
// measures what the driver's calls cost, and map draws the GPU address space of a
// process. It runs without a GPU, too.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/cuda/auto"
)

const usage = `cuvmm inspects this machine for GPU virtual memory.

usage: cuvmm COMMAND [flags]

  doctor    finds what does not work, what that means, and what to do
  info      describes the devices, and measures what the calls cost
  map       draws the GPU address space of a process

"cuvmm COMMAND -h" describes a command's flags. Exit codes: 0 all is well,
1 doctor found a problem, 2 wrong usage, 3 the command failed.
`

// Exit codes.
const (
	exitOK = iota
	exitProblem
	exitUsage
	exitFailed
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr, thisHost())) }

func run(args []string, out, complaints io.Writer, h host) int {
	commands := map[string]func(args []string, out io.Writer, h host) (int, error){"doctor": doctor, "info": info, "map": drawMap}
	if len(args) == 0 || args[0] == "-h" || args[0] == "-help" || args[0] == "--help" || args[0] == "help" {
		fmt.Fprint(out, usage)
		if len(args) == 0 {
			return exitUsage
		}
		return exitOK
	}
	command := commands[args[0]]
	if command == nil {
		fmt.Fprintf(complaints, "cuvmm: there is no command %q: use one of %s\n", args[0], strings.Join(slices.Sorted(maps.Keys(commands)), ", "))
		return exitUsage
	}
	code, err := command(args[1:], out, h)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return exitOK
	case err != nil:
		fmt.Fprintln(complaints, "cuvmm:", err)
	}
	return code
}

// parse reads a command's flags and at most so many arguments, and returns the exit
// code if the command must end.
func parse(f *flag.FlagSet, args []string, most int, out io.Writer, text string) (code int, err error) {
	f.SetOutput(io.Discard)
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprint(out, text)
			f.SetOutput(out)
			f.PrintDefaults()
		}
		return exitUsage, err
	}
	if f.NArg() > most {
		return exitUsage, fmt.Errorf("unexpected argument %q: see cuvmm %s -h", f.Arg(most), f.Name())
	}
	return exitOK, nil
}

// choices are the drivers that the flag -driver selects.
var choices = []string{string(auto.Auto), string(auto.Real), string(auto.Software)}

// checkChoice returns an error if the value of the flag -driver selects none.
func checkChoice(driver string) error {
	if driver != "" && !slices.Contains(choices, driver) {
		return fmt.Errorf("-driver %q: use %s", driver, strings.Join(choices, ", "))
	}
	return nil
}
