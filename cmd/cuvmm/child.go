package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/vmm"
)

// importTrial is the hidden command with which doctor starts the child that imports
// memory. Its argument is the device's ordinal.
const importTrial = "import-trial"

// childTimeout limits the child, which spends most of its time opening the driver.
const childTimeout = time.Minute

// thisProgram returns a command that runs this program again.
func thisProgram(driver string, args ...string) (*exec.Cmd, error) {
	path, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := exec.Command(path, args...)
	if c.Env = os.Environ(); driver != "" {
		c.Env = append(c.Env, auto.DriverEnv+"="+driver)
	}
	return c, nil
}

// shareWithChild sends a granule of memory to a child process, which imports it, and finds
// what the child takes of the device besides. Processes on the software driver see each
// other's memory only if the machine has a folder.
func shareWithChild(d *cuda.Device, h host, driver string) []finding {
	const check = "sharing with a process"
	var kept int
	granule, err := vmm.GranularityOf(d, vmm.Properties{})
	if err == nil {
		kept, err = sendToChild(d, h, driver, granule)
	}
	if err != nil {
		return []finding{{Check: check, Severity: warning, Seen: "a child process could not import memory: " + err.Error(),
			Means:  "processes cannot share memory by descriptor, although this one exports it",
			Remedy: "the error says what to do; containers that share memory need the same GPUs, and a seccomp filter must allow SCM_RIGHTS on sockets"}}
	}
	return []finding{
		ok(check, "a child process received memory by a descriptor and mapped it"),
		ok("idle process", "a process that has the device open and uses no memory of its own keeps about %s of the device's: Suspend does not free it, the process's end does", size(max(0, kept))),
	}
}

// sendToChild returns how much less of the device is free in the child than before, beside
// the memory that it receives.
func sendToChild(d *cuda.Device, h host, driver string, granule int) (kept int, err error) {
	before, _, err := d.MemoryInfo()
	if err != nil {
		return 0, err
	}
	conn, end, err := peer.Pair(peer.Options{})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	child, err := h.child(driver, importTrial, strconv.Itoa(d.Ordinal()))
	if err != nil {
		return 0, errors.Join(err, end.Close())
	}
	var complaints, free bytes.Buffer
	child.ExtraFiles, child.Stderr, child.Stdout = []*os.File{end}, &complaints, &free
	err = child.Start()
	if err = errors.Join(err, end.Close()); err != nil {
		return 0, err
	}
	ended := make(chan error, 1)
	go func() { ended <- child.Wait() }()
	ctx, cancel := context.WithTimeout(context.Background(), childTimeout)
	defer cancel()
	memory, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: granule})
	if err == nil {
		_, err = memory.AppendUndefined(granule)
		if err == nil {
			err = handles.SendBuffer(ctx, conn, memory)
		}
		err = errors.Join(err, memory.Close())
	}
	if err != nil {
		_ = child.Process.Kill() // it may have ended
	}
	if wait := <-ended; wait != nil {
		err = errors.Join(fmt.Errorf("the child: %w: %s", wait, strings.TrimSpace(complaints.String())), err)
	}
	if err != nil {
		return 0, err
	}
	inside, err := strconv.Atoi(strings.TrimSpace(free.String()))
	return before - inside - granule, err
}

// importInChild is the child: it imports memory from the parent, releases it, and prints what
// is free of the device meanwhile.
func importInChild(args []string, out, complaints io.Writer, h host) int {
	if err := receive(args, out, h); err != nil {
		fmt.Fprintln(complaints, err)
		return exitFailed
	}
	return exitOK
}

func receive(args []string, out io.Writer, h host) (err error) {
	if len(args) != 1 {
		return fmt.Errorf("%s is for doctor's own use", importTrial)
	}
	ordinal, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	conn, err := peer.Inherit(os.NewFile(3, "parent"), peer.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	sys, err := h.open("")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	d, err := sys.Device(ordinal)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), childTimeout)
	defer cancel()
	memory, err := handles.ReceiveBuffer(ctx, conn, d, handles.ImportOptions{})
	if err != nil {
		return err
	}
	free, _, err := d.MemoryInfo()
	if err == nil {
		_, err = fmt.Fprintln(out, free)
	}
	return errors.Join(err, memory.Close())
}
