// Command pooltrace replays allocation traces through the pool and reports how
// much memory and time it takes, and writes the traces of the built-in
// generators. It needs no GPU: without one it uses the software driver.
//
//	pooltrace replay [flags] FILE...
//	pooltrace generate [flags]
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
)

const usage = `usage: pooltrace COMMAND [flags] [FILE...]

  replay      replays traces through the pool and prints a table
  generate    lists the generated traces, and writes them to a folder

"pooltrace COMMAND -h" describes a command's flags.
`

func main() {
	err := run(os.Args[1:], os.Stdout, os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "pooltrace:", err)
		os.Exit(1)
	}
}

func run(args []string, out, complaints io.Writer) error {
	commands := map[string]func(args []string, out, complaints io.Writer) error{"replay": replay, "generate": generate}
	if len(args) == 0 {
		return errors.New("no command is named: use replay or generate, or -h for help")
	}
	if args[0] == "-h" || args[0] == "-help" || args[0] == "--help" {
		fmt.Fprint(complaints, usage)
		return flag.ErrHelp
	}
	command := commands[args[0]]
	if command == nil {
		return fmt.Errorf("there is no command %q: use replay or generate", args[0])
	}
	return command(args[1:], out, complaints)
}
