// Command cuvmm inspects a machine and its processes: doctor finds what keeps GPU
// virtual memory from working and says what to do, info describes the devices and
// measures what the driver's calls cost, map draws the GPU address space of a process, top
// lists the processes that use GPUs, serve keeps memory for processes that come and go, objects
// lists, saves and loads what it keeps, sleep takes a process off the GPUs and wake puts it back, load checks files of tensors and
// measures how fast they are loaded, replay and generate measure the pool with allocation
// traces, and version says which cuvmm it is. It runs without a GPU, too.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/cmd/cuvmm/internal/pooltrace"
	"github.com/cuvmm/cuvmm/cuda/auto"
)

// Exit codes.
const (
	exitOK = iota
	exitProblem
	exitUsage
	exitFailed
)

// command is a command of cuvmm.
type command struct {
	name, short, usage string
	// arguments is the largest number of arguments.
	arguments int
	// flags defines the command's flags, and returns the function to run after they are
	// parsed.
	flags func(f *flag.FlagSet) func(args []string, out io.Writer, h host) (int, error)
}

// commands returns the commands by name.
func commands() []command {
	return []command{
		{"doctor", "finds what does not work, what that means, and what to do", doctorUsage, 0, doctor},
		{"info", "describes the devices, and measures what the calls cost", infoUsage, 0, info},
		{"map", "draws the GPU address space of a process", mapUsage, 2, drawMap},
		{"top", "lists the processes that use GPUs, and what they share", topUsage, 0, top},
		{"serve", "keeps memory for processes that come and go", serveUsage, 0, serveObjects},
		{"objects", "lists, verifies, saves, loads and removes what serve keeps", objectsUsage, math.MaxInt, objects},
		{"sleep", "takes a process off the GPUs, with its memory and contexts", sleepUsage, 1, sleepCommand},
		{"wake", "puts a process back that sleeps", wakeUsage, 1, wakeCommand},
		{"load", "checks files of tensors, and measures how fast they are loaded", loadUsage, math.MaxInt, loadFiles},
		{"replay", "replays allocation traces through the pool: memory and time", pooltrace.ReplayUsage, math.MaxInt, traces(pooltrace.Replay)},
		{"generate", "lists the generated traces, and writes them to a folder", pooltrace.GenerateUsage, math.MaxInt, traces(pooltrace.Generate)},
		{"version", "prints the versions of cuvmm and of its snapshots", versionUsage, 0, printVersion},
	}
}

// traces is a command on allocation traces.
func traces(flags func(f *flag.FlagSet) func(args []string, out io.Writer) error) func(f *flag.FlagSet) func([]string, io.Writer, host) (int, error) {
	return func(f *flag.FlagSet) func([]string, io.Writer, host) (int, error) {
		do := flags(f)
		return func(args []string, out io.Writer, _ host) (int, error) {
			err := do(args, out)
			switch {
			case err == nil:
				return exitOK, nil
			case errors.As(err, new(pooltrace.UsageError)):
				return exitUsage, err
			}
			return exitFailed, err
		}
	}
}

func usage() string {
	var b strings.Builder
	b.WriteString("cuvmm inspects this machine and its processes for GPU virtual memory.\n\nusage: cuvmm COMMAND [flags]\n\n")
	for _, c := range commands() {
		fmt.Fprintf(&b, "  %-8s %s\n", c.name, c.short)
	}
	b.WriteString("\n\"cuvmm COMMAND -h\" describes a command's flags. Exit codes: 0 success,\n1 doctor found a problem, 2 wrong usage, 3 the command failed.\n")
	return b.String()
}

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr, thisHost())) }

// run runs a command, and returns the exit code.
func run(args []string, out, complaints io.Writer, h host) int {
	if h.screen = h.onTerminal(out); h.onTerminal(complaints) != nil {
		h.progress = &progress{to: complaints}
	}
	to := &output{to: out}
	code, err := runCommand(args, to, complaints, h)
	h.progress.end()
	if err == nil && to.err != nil {
		code, err = exitFailed, fmt.Errorf("the output is incomplete: %w", to.err)
	}
	if err != nil {
		fmt.Fprintln(plain{complaints}, "cuvmm:", err)
	}
	return code
}

func runCommand(args []string, out, complaints io.Writer, h host) (int, error) {
	if len(args) == 0 || slices.Contains([]string{"-h", "-help", "--help", "help"}, args[0]) {
		fmt.Fprint(out, usage())
		if len(args) == 0 {
			return exitUsage, nil
		}
		return exitOK, nil
	}
	switch args[0] {
	case importTrial:
		return importInChild(args[1:], out, complaints, h), nil
	case sleepHelper:
		return helpToSleep(args[1:], out, complaints, h), nil
	}
	all := append(commands(), command{brokerRole, "", "", 0, runBroker}, command{copyRole, "", "", 0, runCopy})
	at := slices.IndexFunc(all, func(c command) bool { return c.name == args[0] })
	if at < 0 {
		var names []string
		for _, c := range commands() {
			names = append(names, c.name)
		}
		return exitUsage, fmt.Errorf("there is no command %q: use one of %s", args[0], strings.Join(names, ", "))
	}
	return all[at].run(args[1:], out, h)
}

func (c command) run(args []string, out io.Writer, h host) (int, error) {
	f := flag.NewFlagSet(c.name, flag.ContinueOnError)
	f.SetOutput(io.Discard)
	do := c.flags(f)
	switch err := f.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(out, c.usage)
		f.SetOutput(out)
		f.PrintDefaults()
		return exitOK, nil
	case err != nil:
		return exitUsage, fmt.Errorf("%w: see cuvmm %s -h", err, c.name)
	case f.NArg() > c.arguments:
		return exitUsage, fmt.Errorf("unexpected argument %q: see cuvmm %s -h", f.Arg(c.arguments), c.name)
	}
	return do(f.Args(), out, h)
}

// exclusive returns an error if several of the flags are given.
func exclusive(f *flag.FlagSet, names ...string) error {
	var given []string
	f.Visit(func(x *flag.Flag) {
		if slices.Contains(names, x.Name) {
			given = append(given, "-"+x.Name)
		}
	})
	if len(given) > 1 {
		return fmt.Errorf("%s exclude each other: use one at a time", strings.Join(given, " and "))
	}
	return nil
}

// choices are the values of the flag -driver.
var choices = []string{string(auto.Auto), string(auto.Real), string(auto.Software)}

// driverFlag defines the flag -driver.
func driverFlag(f *flag.FlagSet) *string {
	return f.String("driver", "", "the driver to open: "+strings.Join(choices, ", ")+" (default: what "+auto.DriverEnv+" says, or auto)")
}

// checkChoice returns an error if the flag -driver has another value.
func checkChoice(driver string) error {
	if driver != "" && !slices.Contains(choices, driver) {
		return fmt.Errorf("-driver %q: use %s", driver, strings.Join(choices, ", "))
	}
	return nil
}
