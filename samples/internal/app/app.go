// Package app holds what the samples share: the flags that all of them take, the
// opening of a driver, output whose errors count, and other processes that run
// the same sample.
//
// A sample is a [Sample] with a function that gets an [Env]. The function
// declares its flags, calls [Env.Open], and works on Env.System or Env.Device:
//
//	func main() { app.Main(sample) }
//
//	var sample = app.Sample{Name: "02-growable", Shows: "…", Next: "…", Run: run}
//
//	func run(e *app.Env) error {
//		step := e.Flags.Int("step", 1, "…")
//		if err := e.Open(); err != nil {
//			return err
//		}
//		…
//	}
//
// A test calls [Sample.Test], with arguments, or with a System of its own.
// internal/test/sampletest has the table of them.
package app

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/inspect/serve"
)

// Sample describes a program of the course.
type Sample struct {
	// Name is the sample's folder.
	Name string
	// Shows says in one line what the sample shows. It is printed first.
	Shows string
	// Next names the sample to read next, and its subject. It is printed last.
	Next string
	// Arg is the one argument that the sample takes, as its usage shows it; a
	// sample without it takes only flags.
	Arg string
	// Machine describes the software driver's machine, for a computer without a GPU.
	Machine sim.Options
	// Run is the sample.
	Run func(*Env) error
}

// Env is what one run of a sample works with.
type Env struct {
	// Context ends on an interrupt. A second interrupt ends the process.
	Context context.Context
	// Flags takes the sample's own flags until Open parses them.
	Flags *flag.FlagSet
	// Arg is the argument behind the flags, or empty. Open sets it, and the
	// fields below.
	Arg string
	// Role is empty in the process that the user starts, and otherwise what
	// Again was given.
	Role string
	// Machine describes the software driver's machine: the sample's, unless it
	// parses the flags by Parse and changes the machine before Open.
	Machine sim.Options
	// System is the driver, and Device its first device. Run closes neither.
	System *cuda.System
	Device *cuda.Device
	// In is standard input. Out is standard output; several goroutines may write
	// to it, and a failed write makes the sample fail.
	In  io.Reader
	Out io.Writer

	sample Sample
	args   []string
	driver string
	opened bool
	offer  *serve.Offered
}

// Main runs the sample with the process's arguments and ends the process on an
// error: with status 2 if the arguments are wrong.
func Main(s Sample) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	context.AfterFunc(ctx, stop) // from then on an interrupt has its usual effect
	if started() {
		ctx = untilOrphaned(ctx)
	}
	err := s.Test(ctx, nil, os.Args[1:], os.Stdin, os.Stdout)
	stop()
	switch usage := (usageError{}); {
	case err == nil:
	case errors.As(err, &usage):
		fmt.Fprintf(os.Stderr, "%s: %v (-h lists the flags)\n", s.Name, err)
		os.Exit(2)
	default:
		fmt.Fprintf(os.Stderr, "%s: %v\n", s.Name, err)
		os.Exit(1)
	}
}

// Test runs the sample with the arguments: on sys, which stays open, or on the
// driver that the flags choose if sys is nil.
func (s Sample) Test(ctx context.Context, sys *cuda.System, args []string, in io.Reader, out io.Writer) (err error) {
	written := &writer{out: out}
	e := &Env{Context: ctx, Machine: s.Machine, System: sys, In: in, Out: written, sample: s, args: args}
	e.Flags = flag.NewFlagSet(s.Name, flag.ContinueOnError)
	e.Flags.SetOutput(io.Discard) // errors are returned, and printed once
	e.Flags.StringVar(&e.driver, "driver", "", "`auto`, real or sim (default: $CUVMM_DRIVER, or auto)")
	e.Flags.StringVar(&e.Role, "as", "", "the `role` of a process that the sample itself starts")
	e.Flags.Usage = func() {} // Parse prints it for -h, and not for each wrong flag
	err = s.Run(e)
	if err == nil && e.Role == "" && s.Next != "" {
		e.Line("next", "samples/%s", s.Next)
	}
	if e.offer != nil {
		err = errors.Join(err, e.offer.Close())
	}
	if e.opened {
		err = errors.Join(err, e.System.Close())
	}
	if errors.Is(err, flag.ErrHelp) {
		err = nil // it was printed
	}
	return errors.Join(err, written.failed())
}

func (e *Env) usage() {
	arg := ""
	if e.sample.Arg != "" {
		arg = " [" + e.sample.Arg + "]"
	}
	fmt.Fprintf(e.Out, "%s: %s\n\nusage: go run ./samples/%s [FLAGS]%s\n", e.sample.Name, e.sample.Shows, e.sample.Name, arg)
	e.Flags.SetOutput(e.Out)
	e.Flags.PrintDefaults()
	e.Flags.SetOutput(io.Discard)
}

// usageError is what the user typed wrong.
type usageError struct{ error }

func (u usageError) Unwrap() error { return u.error }

// Usagef returns an error about the arguments.
func Usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// Parse parses the flags, unless that is done. Open calls it.
func (e *Env) Parse() error {
	if e.Flags.Parsed() {
		return nil
	}
	if err := e.Flags.Parse(e.args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			e.usage()
		}
		return usageError{err}
	}
	switch n := e.Flags.NArg(); {
	case n > 0 && e.sample.Arg == "":
		return Usagef("argument %q: only flags are taken", e.Flags.Arg(0))
	case n > 1:
		return Usagef("%d arguments given, and flags come first: name one [%s]", n, e.sample.Arg)
	}
	e.Arg = e.Flags.Arg(0)
	return nil
}

// Open parses the flags, opens the driver, and prints which it is.
func (e *Env) Open() error {
	if err := e.Parse(); err != nil {
		return err
	}
	if e.System == nil {
		if d := auto.Choice(e.driver); d != "" && d != auto.Auto && d != auto.Real && d != auto.Software {
			return Usagef("-driver %q: use auto, real or sim", d)
		}
		sys, err := auto.Open(auto.Options{Driver: auto.Choice(e.driver), Machine: e.Machine})
		if err != nil {
			return err
		}
		e.System, e.opened = sys, true
	}
	dev, err := e.System.Device(0)
	if err != nil {
		return err
	}
	e.Device = dev
	if e.Role == "" {
		e.Line("shows", "%s", e.sample.Shows)
		e.Line("driver", "%v", e.System.Driver())
		for _, d := range e.System.Devices() {
			e.Line("device", "%v, %d MiB", d, d.TotalMemory()>>20)
		}
	}
	return nil
}

// Offer lets cuvmm map and cuvmm top show the process until the sample ends, on systems
// that have sockets for it.
func (e *Env) Offer() (err error) {
	if e.offer, err = serve.Offer(e.System); errors.Is(err, cuda.ErrNotSupported) {
		return nil
	}
	if err == nil && e.Role == "" {
		e.Line("map", "go run -C cmd/cuvmm . map %d", os.Getpid())
	}
	return err
}

// Line prints a line of output under a label.
func (e *Env) Line(label, format string, args ...any) {
	fmt.Fprintf(e.Out, "%-10s %s\n", label, fmt.Sprintf(format, args...))
}

// Close closes c and joins its error into err, the function's result. It is for
// defer:
//
//	defer app.Close(array, &err)
//
// In a loop assign with =, since := declares another err there.
func Close(c io.Closer, err *error) { *err = errors.Join(*err, c.Close()) }
