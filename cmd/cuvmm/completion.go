package main

import (
	"flag"
	"fmt"
	"io"
	"strings"
)

const completionUsage = `usage: cuvmm completion SHELL

Prints a script that completes cuvmm's commands and flags in bash, zsh or fish:

  source <(cuvmm completion bash)        in ~/.bashrc
  source <(cuvmm completion zsh)         in ~/.zshrc, after compinit
  cuvmm completion fish | source         in ~/.config/fish/config.fish
`

func completion(*flag.FlagSet) func(args []string, out io.Writer, h host) (int, error) {
	return func(args []string, out io.Writer, _ host) (int, error) {
		shells := map[string]func(io.Writer){"bash": completeBash, "zsh": completeZsh, "fish": completeFish}
		if len(args) != 1 || shells[args[0]] == nil {
			return exitUsage, fmt.Errorf("%s: name bash, zsh or fish", strings.Join(append([]string{"completion"}, args...), " "))
		}
		shells[args[0]](out)
		return exitOK, nil
	}
}

// flagsOf returns the names and usage texts of a command's flags.
func flagsOf(c command) (all [][2]string) {
	f := flag.NewFlagSet(c.name, flag.ContinueOnError)
	c.flags(f)
	f.VisitAll(func(f *flag.Flag) { all = append(all, [2]string{f.Name, f.Usage}) })
	return all
}

func completeBash(out io.Writer) {
	var names []string
	fmt.Fprint(out, "_cuvmm() {\n\tlocal word=${COMP_WORDS[COMP_CWORD]} flags=\n\tCOMPREPLY=()\n\tcase ${COMP_WORDS[1]} in\n")
	for _, c := range commands() {
		names = append(names, c.name)
		var flags []string
		for _, f := range flagsOf(c) {
			flags = append(flags, "-"+f[0])
		}
		fmt.Fprintf(out, "\t%s) flags=%q ;;\n", c.name, strings.Join(flags, " "))
	}
	fmt.Fprintf(out, "\tesac\n\tif [ \"$COMP_CWORD\" = 1 ]; then\n\t\tCOMPREPLY=($(compgen -W %q -- \"$word\"))\n"+
		"\telif [[ $word == -* ]]; then\n\t\tCOMPREPLY=($(compgen -W \"$flags\" -- \"$word\"))\n"+
		"\telif [ \"${COMP_WORDS[1]}\" = completion ]; then\n\t\tCOMPREPLY=($(compgen -W \"bash zsh fish\" -- \"$word\"))\n"+
		"\telse\n\t\tCOMPREPLY=($(compgen -f -- \"$word\"))\n\tfi\n}\ncomplete -o filenames -F _cuvmm cuvmm\n", strings.Join(names, " "))
}

// quoted returns text in a shell's single quotes.
func quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

func completeZsh(out io.Writer) {
	fmt.Fprint(out, "#compdef cuvmm\n_cuvmm() {\n\tlocal -a commands=(\n")
	for _, c := range commands() {
		fmt.Fprintf(out, "\t\t%s\n", quoted(c.name+":"+c.short))
	}
	fmt.Fprint(out, "\t)\n\tif (( CURRENT == 2 )); then\n\t\t_describe command commands\n\t\treturn\n\tfi\n\tcase $words[2] in\n")
	escape := strings.NewReplacer("[", `\[`, "]", `\]`, ":", `\:`)
	for _, c := range commands() {
		fmt.Fprintf(out, "\t%s) _arguments", c.name)
		for _, f := range flagsOf(c) {
			fmt.Fprint(out, " "+quoted("-"+f[0]+"["+escape.Replace(f[1])+"]"))
		}
		rest := "*:file:_files"
		if c.name == "completion" {
			rest = "*:shell:(bash zsh fish)"
		}
		fmt.Fprintf(out, " %s ;;\n", quoted(rest))
	}
	fmt.Fprint(out, "\tesac\n}\ncompdef _cuvmm cuvmm\n")
}

func completeFish(out io.Writer) {
	for _, c := range commands() {
		fmt.Fprintf(out, "complete -c cuvmm -n __fish_use_subcommand -f -a %s -d %s\n", c.name, quoted(c.short))
		for _, f := range flagsOf(c) {
			fmt.Fprintf(out, "complete -c cuvmm -n %s -o %s -d %s\n", quoted("__fish_seen_subcommand_from "+c.name), f[0], quoted(f[1]))
		}
	}
	fmt.Fprint(out, "complete -c cuvmm -n '__fish_seen_subcommand_from completion' -f -a 'bash zsh fish'\n")
}
