package pooltrace

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/cuvmm/cuvmm/internal/tracegen"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
)

// GenerateUsage is the help of the command generate.
const GenerateUsage = `usage: cuvmm generate [flags]

Prints a line for each generated trace, and writes the traces to files if it is given a
folder. cuvmm replay replays them.

Flags:
`

// Generate defines the command's flags, and returns the command.
func Generate(f *flag.FlagSet) func(args []string, out io.Writer) error {
	var c tracegen.Config
	folder := f.String("out", "", "write each trace to `FOLDER`/NAME.trace (or NAME.jsonl)")
	only := f.String("only", "", "the one `GENERATOR` to run (default all)")
	first := f.Uint64("first", 0, "the first seed")
	seeds := f.Uint64("seeds", 20, "how many seeds")
	text := f.Bool("text", false, "write one JSON object per line, not the binary form")
	f.IntVar(&c.Streams, "streams", 1, "streams that the programs use")
	f.Uint64Var(&c.Divisor, "divisor", 1, "divide the size of every block by this")
	return func(args []string, out io.Writer) error {
		switch {
		case len(args) > 0:
			return wrong("generate takes no files, but was given %q: name the folder to write with -out", args[0])
		case *seeds < 1:
			return wrong("-seeds %d: use at least 1", *seeds)
		}
		return generate(c, *folder, *only, *first, *seeds, *text, out)
	}
}

func generate(c tracegen.Config, folder, only string, first, seeds uint64, text bool, out io.Writer) error {
	var names []string
	found := only == ""
	for _, g := range tracegen.Generators() {
		names = append(names, g.Name)
		found = found || g.Name == only
	}
	if !found {
		return wrong("-only %s: the generators are %s", only, strings.Join(names, ", "))
	}
	for _, g := range tracegen.Generators() {
		if only != "" && g.Name != only {
			continue
		}
		for seed := range seeds {
			c.Seed = first + seed
			t := g.Make(c)
			s, err := t.Summary()
			if err != nil {
				return err
			}
			if _, err := fmt.Fprintf(out, "%-12s %6d operations, at most %8.1f MiB in %5d blocks\n", t.Name, len(t.Ops), float64(s.PeakBytes)/(1<<20), s.PeakBlocks); err != nil {
				return err
			}
			if folder != "" {
				if err := write(t, folder, text); err != nil {
					return err
				}
			}
		}
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
