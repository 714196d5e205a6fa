package app

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/inspect/serve"
	"github.com/cuvmm/cuvmm/vmm"
)

var sample = Sample{
	Name: "00-test", Shows: "what is shared", Next: "01-hello: the first", Arg: "FILE",
	Machine: sim.Options{Devices: make([]sim.DeviceOptions, 2)},
	Run: func(e *Env) error {
		size := e.Size("size", "4KiB", "a `size`")
		if err := e.Open(); err != nil {
			return err
		}
		e.Line("size", "%d of %q", *size, e.Arg)
		return nil
	},
}

func TestOutput(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, sample.Test(t.Context(), nil, []string{"-driver", "sim", "-size", "2MiB", "a"}, nil, &out))
	require.Equal(t, "shows      what is shared\n"+
		"driver     software driver, CUDA 13.0\n"+
		"device     device 0 (Software GPU), 16384 MiB\n"+
		"device     device 1 (Software GPU), 16384 MiB\n"+
		"size       2097152 of \"a\"\n"+
		"next       samples/01-hello: the first\n", out.String())

	out.Reset()
	require.NoError(t, sample.Test(t.Context(), nil, []string{"-as", "child", "-driver", "sim"}, nil, &out))
	require.Equal(t, "size       4096 of \"\"\n", out.String())
}

func TestArguments(t *testing.T) {
	for _, row := range []struct {
		args []string
		says string
	}{
		{[]string{"a", "b"}, "2 arguments given, and flags come first: name one [FILE]"},
		{[]string{"-fast"}, "not defined: -fast"},
		{[]string{"-size", "0"}, `"0": use a positive size up to 1GiB`},
		{[]string{"-size", "-4MiB"}, "positive size"},
		{[]string{"-size", "4MB"}, "positive size"},
		{[]string{"-size", "2GiB"}, "up to 1GiB"},
		{[]string{"-size", "9999999999999999999"}, "positive size"},
	} {
		var out bytes.Buffer
		err := sample.Test(t.Context(), nil, row.args, nil, &out)
		require.ErrorContains(t, err, row.says)
		require.ErrorAs(t, err, new(usageError))
		require.Empty(t, out.String())
	}
	flagsOnly := sample
	flagsOnly.Arg = ""
	require.ErrorContains(t, flagsOnly.Test(t.Context(), nil, []string{"-driver", "sim", "file"}, nil, io.Discard), `argument "file": only flags`)
	err := sample.Test(t.Context(), nil, []string{"-driver", "gpu"}, nil, io.Discard)
	require.ErrorContains(t, err, `-driver "gpu": use auto, real or sim`)
	require.ErrorAs(t, err, new(usageError))
}

func TestHelp(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, sample.Test(t.Context(), nil, []string{"-h"}, nil, &out))
	for _, s := range []string{"what is shared", "usage: go run ./samples/00-test [FLAGS] [FILE]", "-driver auto", "-size size", "(default 4KiB)"} {
		require.Contains(t, out.String(), s)
	}
}

// A system of the caller's stays open; one that the sample opened is closed, and
// what it left open is an error.
func TestSystems(t *testing.T) {
	_, sys := sim.Open(t)
	require.NoError(t, sample.Test(t.Context(), sys, nil, nil, io.Discard))
	_, err := sys.Device(0)
	require.NoError(t, err)

	var left *vmm.Buffer
	leaky := Sample{Name: "leaky", Run: func(e *Env) (err error) {
		if err := e.Open(); err != nil {
			return err
		}
		sys = e.System
		left, err = vmm.NewBuffer(e.Device, vmm.BufferOptions{})
		return err
	}}
	require.ErrorContains(t, leaky.Test(t.Context(), nil, []string{"-driver", "sim"}, nil, io.Discard), "live objects")
	require.NoError(t, errors.Join(left.Close(), sys.Close()))
}

func TestFailedWritesAreErrors(t *testing.T) {
	out, err := os.Open(os.DevNull) // for reading alone
	require.NoError(t, err)
	defer out.Close()
	for _, args := range [][]string{{"-driver", "sim"}, {"-h"}} {
		require.ErrorContains(t, sample.Test(t.Context(), nil, args, nil, out), "write "+os.DevNull)
	}
}

func TestAgain(t *testing.T) {
	e := Env{driver: "sim", Out: io.Discard}
	cmd, err := e.Again(t.Context(), "child", "-n", "3")
	require.NoError(t, err)
	require.Equal(t, "[-as child -driver sim -n 3]", fmt.Sprint(cmd.Args[1:]))
}

// A sample that offers its map does so until it ends.
func TestOffer(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("sockets are offered on Linux")
	}
	dir, err := os.MkdirTemp("", "app") //nolint:usetesting // which makes longer paths than a socket's may be
	require.NoError(t, err)
	defer os.RemoveAll(dir)
	t.Setenv("XDG_RUNTIME_DIR", dir)
	offering := Sample{Name: "00-test", Shows: "its map", Run: func(e *Env) error {
		if err := errors.Join(e.Open(), e.Offer()); err != nil {
			return err
		}
		found, err := serve.Find(t.Context())
		require.Len(t, found, 1)
		return err
	}}
	var out bytes.Buffer
	require.NoError(t, offering.Test(t.Context(), nil, []string{"-driver", "sim"}, nil, &out))
	require.Contains(t, out.String(), fmt.Sprintf("map        go run -C cmd/cuvmm . map %d\n", os.Getpid()))
	sockets, err := filepath.Glob(filepath.Join(dir, "cuvmm", "*.sock"))
	require.NoError(t, err)
	require.Empty(t, sockets)

	require.NoError(t, os.Chmod(filepath.Join(dir, "cuvmm"), 0o755)) //nolint:gosec // which Offer refuses
	require.ErrorContains(t, offering.Test(t.Context(), nil, []string{"-driver", "sim"}, nil, &out), "so other users may enter it")
}
