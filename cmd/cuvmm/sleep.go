package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/inspect/serve"
	"github.com/cuvmm/cuvmm/internal/checkpoint"
)

const sleepUsage = `usage: cuvmm sleep [flags] PID

Takes a process off the GPUs: its memory, its contexts, all that it has there. The process
must be this user's and have called serve.OfferSleep. It runs on; its calls to the driver
wait. What keeps it awake is listed, with a remedy. Otherwise the process suspends its
memory, and a helper, which is another cuvmm, has the driver take the rest (CUDA 12.8 or
later). If anything fails on the way, the process is woken.

What the library cannot see: descriptors of memory that the program exported by itself,
memory that other libraries share or import, and their managed memory. With imported memory
the process is lost when it is woken. Of work that does not end the driver's lock finds out.

A process that has not called serve.OfferSleep, as one of PyTorch, is taken with -unprepared:
nothing checks then whether it has what a checkpoint loses.

"cuvmm wake PID" puts the process back. Before that as much memory must be free as it had:
a restore that fails loses the process.

Flags:
`

const wakeUsage = `usage: cuvmm wake [flags] PID

Puts a process back that "cuvmm sleep" took off the GPUs, or whose sleep was interrupted,
from whichever step. As much memory must be free as the process had: a restore that fails
loses the process, which cannot use the GPU any more and must be ended.

Flags:
`

const needsRoom = "cuvmm wake %d needs room for all that it had on the devices: a restore without room loses the process\n"

// sleepHelper is the hidden command of the helper, which does what both commands say. Its
// arguments are the command, the process's number, and both durations.
const sleepHelper = "sleep-helper"

func sleepCommand(f *flag.FlagSet) func(args []string, out io.Writer, h host) (int, error) {
	timeout := f.Duration("timeout", 10*time.Second, "how long the work of the process may take to end")
	unprepared := f.Bool("unprepared", false, "take a process that has not called serve.OfferSleep: nothing checks what would be lost")
	return withHelper(f, func() string {
		if *unprepared {
			return "sleep unprepared"
		}
		return "sleep"
	}, timeout)
}

func wakeCommand(f *flag.FlagSet) func(args []string, out io.Writer, h host) (int, error) {
	none := time.Duration(1)
	return withHelper(f, func() string { return "wake" }, &none)
}

// withHelper is a command that a helper carries out.
func withHelper(f *flag.FlagSet, command func() string, timeout *time.Duration) func(args []string, out io.Writer, h host) (int, error) {
	driver := driverFlag(f)
	wait := f.Duration("wait", 5*time.Minute, "how long to wait for the helper, which then goes on alone")
	return func(args []string, out io.Writer, h host) (int, error) {
		err := checkChoice(*driver)
		pid, notNumber := strconv.Atoi(strings.Join(args, " "))
		switch {
		case err != nil:
			return exitUsage, err
		case len(args) != 1:
			return exitUsage, errors.New("name one process by its number: cuvmm top lists those that offer a socket")
		case notNumber != nil || pid <= 0 || pid > math.MaxInt32:
			return exitUsage, fmt.Errorf("%q is not the number of a process", args[0])
		case *timeout <= 0 || *wait <= 0:
			return exitUsage, fmt.Errorf("-timeout %v, -wait %v: give some time", *timeout, *wait)
		}
		c, err := h.child(*driver, sleepHelper, command(), args[0], timeout.String(), wait.String())
		if err == nil {
			err = await(c, out, *wait, pid)
		}
		if err != nil {
			return exitFailed, err
		}
		return exitOK, nil
	}
}

// await runs a helper, and prints what it says. Of the driver's calls only the lock has a
// timeout, so the helper may be left to itself.
func await(c *exec.Cmd, out io.Writer, wait time.Duration, pid int) error {
	var said, complaints bytes.Buffer
	c.Stdout, c.Stderr = &said, &complaints
	if err := c.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	select {
	case err := <-ended:
		if err != nil && complaints.Len() > 0 {
			err = errors.New(strings.TrimSpace(complaints.String()))
		}
		_, _ = said.WriteTo(out) // whose errors are noticed
		return err
	case <-time.After(wait):
		return fmt.Errorf("it is not done after %v: the helper, process %d, goes on; when it has ended, cuvmm wake %d puts the process back", wait, c.Process.Pid, pid)
	}
}

// helpToSleep is the helper. An interrupt of the terminal does not end it: what it began must
// not stop half-way.
func helpToSleep(args []string, out, complaints io.Writer, h host) int {
	signal.Ignore(os.Interrupt)
	if err := carryOut(args, out, h); err != nil {
		fmt.Fprintln(complaints, err)
		return exitFailed
	}
	return exitOK
}

func carryOut(args []string, out io.Writer, h host) (err error) {
	if len(args) != 4 {
		return fmt.Errorf("%s is for the own use of sleep and wake", sleepHelper)
	}
	pid, notNumber := strconv.Atoi(args[1])
	timeout, noTime := time.ParseDuration(args[2])
	wait, noWait := time.ParseDuration(args[3])
	if err := errors.Join(notNumber, noTime, noWait); err != nil {
		return err
	}
	if other, err := os.FindProcess(pid); err != nil || errors.Is(other.Signal(syscall.Signal(0)), os.ErrProcessDone) {
		return fmt.Errorf("there is no process %d: cuvmm top lists those that offer a socket", pid)
	}
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	sockets, err := serve.Find(ctx)
	if err != nil {
		return err
	}
	sockets = slices.DeleteFunc(sockets, func(s serve.Socket) bool { return s.PID != pid })
	sys, err := h.open("")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	p := checkpoint.Of(sys, pid)
	switch {
	case len(sockets) > 1:
		return fmt.Errorf("process %d offers %d sockets to this user: have it call serve.OfferSleep once, and serve.Offer not at all", pid, len(sockets))
	case args[0] == "wake":
		return wake(ctx, out, sockets, p, pid)
	case len(sockets) == 1:
		blockers, err := sockets[0].Prepare(ctx)
		if err == nil && len(blockers) == 0 {
			return sleep(ctx, out, sockets[0], p, timeout)
		}
		if !errors.Is(err, cuda.ErrNotSupported) {
			return stays(pid, err, blockers)
		}
	}
	if args[0] == "sleep" {
		return fmt.Errorf("process %d has not called serve.OfferSleep: have it do that in place of serve.Offer, or add -unprepared, with which nothing checks what would be lost", pid)
	}
	if err := p.Sleep(timeout); err != nil {
		return err
	}
	fmt.Fprintf(plain{out}, "process %d sleeps: the driver took what it had\n"+needsRoom, pid, pid)
	return nil
}

// stays says why a process was not prepared.
func stays(pid int, err error, blockers []serve.Blocker) error {
	if err != nil {
		return err
	}
	text := fmt.Sprintf("process %d stays awake, because it has", pid)
	for _, b := range blockers {
		text += fmt.Sprintf("\n  %s: %s", b.What, b.Remedy)
	}
	return errors.New(text)
}

// sleep lets the process, which is prepared, suspend its memory only when the driver has found
// that its work ends: to suspend waits for that, too, and without an end.
func sleep(ctx context.Context, out io.Writer, socket serve.Socket, p checkpoint.Process, timeout time.Duration) error {
	given, err := 0, p.Settle(timeout)
	if err == nil {
		given, err = socket.Suspend(ctx)
	}
	if err == nil {
		err = p.Sleep(timeout)
	}
	if err != nil {
		return errors.Join(err, socket.Wake(ctx))
	}
	fmt.Fprintf(plain{out}, "process %d sleeps: it suspended %s, and the driver took the rest\n"+needsRoom, socket.PID, size(given), socket.PID)
	return nil
}

func wake(ctx context.Context, out io.Writer, sockets []serve.Socket, p checkpoint.Process, pid int) error {
	if err := p.Wake(); err != nil {
		return err
	}
	for _, s := range sockets {
		if err := s.Wake(ctx); err != nil && !errors.Is(err, cuda.ErrNotSupported) {
			return fmt.Errorf("%w; process %d runs, and its memory is still suspended: make room, and wake it again", err, pid)
		}
	}
	fmt.Fprintf(plain{out}, "process %d is awake\n", pid)
	return nil
}
