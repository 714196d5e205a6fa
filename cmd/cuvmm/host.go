package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
)

// host is how the commands reach the machine. Tests replace it.
type host struct {
	root   string // prefix of every path
	env    func(name string) (string, bool)
	limit  func(of resource) (uint64, error)         // the limit in force
	access func(path string) error                   // whether the process may read and write a file
	open   func(driver string) (*cuda.System, error) // driver is as auto.Options.Driver
	// environ lists the environment, and command runs a program from PATH and returns
	// its output.
	environ func() []string
	command func(name string, args ...string) (string, error)
	child   func(driver string, args ...string) (*exec.Cmd, error) // runs this program
	// screen is the standard output if that is a terminal, and progress reports the step
	// under way on a terminal. Both are nil otherwise.
	screen   *os.File
	progress *progress
}

// A resource has a limit that the operating system sets.
type resource int

const (
	openedFiles resource = iota
	addresses            // bytes of address space
)

func thisHost() host {
	return host{
		root:    "/",
		env:     os.LookupEnv,
		limit:   limitOf,
		access:  readAndWrite,
		environ: os.Environ,
		command: runProgram,
		child:   thisProgram,
		open: func(driver string) (*cuda.System, error) {
			return auto.Open(auto.Options{Driver: auto.Choice(driver), CUDA: cuda.Options{NamedStreamsOnly: true}})
		},
	}
}

// runProgram runs a program with a timeout, because nvidia-smi hangs on a faulty GPU.
func runProgram(name string, args ...string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", errNoCommand
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, args...).Output()
	if err != nil && ctx.Err() != nil {
		err = errors.New("it did not end within 20 seconds")
	}
	return string(out), err
}

func (h host) path(name string) string { return filepath.Join(h.root, name) }

// text returns a file's contents without surrounding white space, or "".
func (h host) text(name string) string {
	b, err := os.ReadFile(h.path(name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func (h host) exists(name string) bool {
	_, err := os.Stat(h.path(name))
	return err == nil
}

// names returns the entries of a folder.
func (h host) names(name string) (all []string) {
	entries, err := os.ReadDir(h.path(name))
	if err != nil {
		return nil
	}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// field returns the value of the line "name: value" of a file.
func (h host) field(file, name string) string {
	for _, line := range strings.Split(h.text(file), "\n") {
		if value, found := strings.CutPrefix(line, name+":"); found {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
