// Command tracegen prints what the generators of package trace make, one line
// for each, and writes the traces to files where it is told a folder.
package main

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/cuvmm/cuvmm/vmm/pool/trace"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "tracegen:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	f := flag.NewFlagSet("tracegen", flag.ContinueOnError)
	var c trace.Config
	folder := f.String("out", "", "write each trace to `FOLDER`/NAME.trace (or NAME.jsonl)")
	only := f.String("only", "", "the one `GENERATOR` to run (default all)")
	seeds := f.Uint64("seeds", 20, "how many seeds, from 0 on")
	text := f.Bool("text", false, "write a JSON object a line, not the binary form")
	f.IntVar(&c.Streams, "streams", 1, "streams that the programs use")
	f.Uint64Var(&c.Divisor, "divisor", 1, "make every block smaller by this factor")
	if err := f.Parse(args); err != nil {
		return err
	}
	var names []string
	for _, g := range trace.Generators() {
		names = append(names, g.Name)
		if *only != "" && g.Name != *only {
			continue
		}
		for c.Seed = range *seeds {
			t := g.Make(c)
			s, err := t.Summary()
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "%-12s %6d operations, at most %8.1f MiB in %5d blocks\n", t.Name, len(t.Ops), float64(s.PeakBytes)/(1<<20), s.PeakBlocks)
			if *folder != "" {
				if err := write(t, *folder, *text); err != nil {
					return err
				}
			}
		}
	}
	if *only != "" && !strings.Contains(" "+strings.Join(names, " ")+" ", " "+*only+" ") {
		return fmt.Errorf("-only %s: the generators are %s", *only, strings.Join(names, ", "))
	}
	return nil
}

func write(t *trace.Trace, folder string, text bool) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	name := filepath.Join(folder, t.Name)
	if !text {
		b, err := t.MarshalBinary()
		if err != nil {
			return err
		}
		return os.WriteFile(name+".trace", b, 0o644)
	}
	file, err := os.Create(name + ".jsonl")
	if err != nil {
		return err
	}
	w := bufio.NewWriter(file)
	err = t.WriteText(w)
	if err == nil {
		err = w.Flush()
	}
	if closed := file.Close(); err == nil {
		err = closed
	}
	return err
}
