// Package pooltrace replays allocation traces through the pool, and writes the traces of the
// built-in generators: the commands replay and generate of cuvmm. They need no GPU: without
// one they use the software driver.
package pooltrace

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
)

// ReplayUsage is the help of the command replay.
const ReplayUsage = `usage: cuvmm replay [flags] FILE...

Replays each trace twice through a new pool, and prints a line per trace and
mode: the most memory reserved over the most requested, the mean time of an
allocation or a free in both passes, and the slowest one. In brackets: without
waiting for memory that the GPU still used. A * marks an operation that is over
the bound without that: 2 ms (above 1.5 GiB: 1.5 ms for each GiB).

A FILE is a list of [block, bytes] in JSON (0 bytes free the block), a trace in
the library's binary or text form, or either of these compressed with gzip.
Snapshots of PyTorch's memory are converted by scripts/pool-peers.py convert.

Modes:
  idle        the GPU has nothing to do
  behind      each block is set over its whole length, so that the program runs
              ahead of the GPU (the software driver sets both ends only: its GPU
              is late by design)
  streams     behind, with the operations spread over several streams, 256 in a row
  goroutines  behind, with several goroutines that replay a copy of the trace
              each on a stream of its own, all blocks as much smaller

Flags:
`

// traceSources says where a user gets a trace.
const traceSources = "record one with pool.History.Trace, or make some with cuvmm generate -out FOLDER"

// result is a line of the table, and of the output in JSON. Times are in microseconds;
// those that worked are without waiting for memory that the GPU still used.
type result struct {
	Trace          string  `json:"trace"`
	Allocator      string  `json:"allocator"`
	Mode           string  `json:"mode"`
	Operations     int     `json:"operations"`
	Requested      int     `json:"requested"` // bytes, at the peak
	Reserved       int     `json:"reserved"`  // bytes, at the peak
	FirstUs        float64 `json:"first_us"`  // of an operation, in the first pass
	SecondUs       float64 `json:"second_us"`
	FirstWorkedUs  float64 `json:"first_worked_us"`
	SecondWorkedUs float64 `json:"second_worked_us"`
	LongestUs      float64 `json:"longest_us"` // of one operation
	WorkedUs       float64 `json:"worked_us"`
	LongestOf      int     `json:"longest_bytes"` // the block of the one that worked longest
	Over           int     `json:"over"`          // operations over the bound; at most 8 a pass are counted
	Error          string  `json:"error,omitempty"`
}

// UsageError is an error of a command's arguments.
type UsageError struct{ error }

func wrong(format string, args ...any) error { return UsageError{fmt.Errorf(format, args...)} }

// Replay defines the command's flags, and returns the command.
func Replay(f *flag.FlagSet) func(files []string, out io.Writer) error {
	choice := f.String("driver", "", "the driver: auto, real or sim (default: what "+auto.DriverEnv+" says, or auto)")
	memory := f.Int("memory", 256, "`GiB` of memory that the software driver's device has")
	limit := f.Float64("limit", 0, "the pool's limit in `GiB`; 0 is none")
	names := f.String("modes", "idle,behind", "the modes, with commas between them, or all")
	many := f.Int("many", 4, "how many streams or goroutines the modes streams and goroutines use")
	asJSON := f.Bool("json", false, "print one JSON object per line instead of a table")
	return func(files []string, out io.Writer) error {
		chosen, err := chooseModes(*names, *many)
		switch {
		case err != nil:
			return err
		case *many < 2 || *many > trace.MaxStreams:
			return wrong("-many %d: use 2 to %d", *many, trace.MaxStreams)
		case len(files) == 0:
			return wrong("replay needs the files of traces: " + traceSources)
		}
		var traces []*trace.Trace
		for _, name := range files {
			t, err := load(name)
			if err != nil {
				return err
			}
			traces = append(traces, t)
		}
		sys, err := auto.Open(auto.Options{
			Driver:  auto.Choice(*choice),
			CUDA:    cuda.Options{NamedStreamsOnly: true},
			Machine: sim.Options{Devices: []sim.DeviceOptions{{Memory: *memory << 30}}},
		})
		if err != nil {
			return err
		}
		d, err := sys.Device(0)
		if err == nil {
			err = replayAll(out, d, traces, chosen, pool.Options{Limit: int(*limit * (1 << 30))}, *asJSON)
		}
		return errors.Join(err, sys.Close())
	}
}

func replayAll(out io.Writer, d *cuda.Device, traces []*trace.Trace, chosen []mode, o pool.Options, asJSON bool) error {
	failed := 0
	lines := json.NewEncoder(out)
	if !asJSON {
		if _, err := fmt.Fprintf(out, tableHead, d.Name(), d.System().Driver()); err != nil {
			return err
		}
	}
	for _, t := range traces {
		for _, m := range chosen {
			r := measure(d, t, m, o)
			if r.Error != "" {
				failed++
			}
			var err error
			if asJSON {
				err = lines.Encode(r)
			} else {
				_, err = fmt.Fprintln(out, r.row())
			}
			if err != nil {
				return err
			}
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d replays failed: their lines say why", failed, len(traces)*len(chosen))
	}
	return nil
}

const tableHead = `%s, %s

| trace | mode | operations | requested, GiB | reserved/requested | first pass, µs | second, µs | longest, ms | of MiB |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
`

func (r result) row() string {
	if r.Error != "" {
		return fmt.Sprintf("| %s | %s | failed: %s | | | | | | |", r.Trace, r.Mode, strings.ReplaceAll(r.Error, "\n", "; "))
	}
	mark := ""
	if r.Over > 0 {
		mark = " *"
	}
	return fmt.Sprintf("| %s | %s | %d | %.2f | %.4f | %.2f [%.2f] | %.2f [%.2f] | %.2f [%.2f%s] | %.1f |", r.Trace, r.Mode, r.Operations,
		float64(r.Requested)/(1<<30), float64(r.Reserved)/float64(max(r.Requested, 1)), r.FirstUs, r.FirstWorkedUs,
		r.SecondUs, r.SecondWorkedUs, r.LongestUs/1000, r.WorkedUs/1000, mark, float64(r.LongestOf)/(1<<20))
}

// load reads a trace. One without a name has that of its file.
func load(path string) (*trace.Trace, error) {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: name the file of a trace: %s", err, traceSources)
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	name := filepath.Base(path)
	for _, end := range []string{".gz", ".json"} {
		name = strings.TrimSuffix(name, end)
	}
	t, err := trace.Read(file, name)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}
