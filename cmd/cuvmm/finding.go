package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// severity is how much a finding matters.
type severity string

const (
	fine    severity = "ok"
	note    severity = "note"    // worth knowing
	warning severity = "warning" // a feature is missing, or does not behave as expected
	problem severity = "problem" // the library cannot work
)

// finding is one thing that was looked at.
type finding struct {
	Check    string   `json:"check"`
	Severity severity `json:"severity"`
	// Device is the device's ordinal, or -1 if the finding is about the machine.
	Device int `json:"device"`
	// Seen is what was found, Means what follows from it for which feature, and
	// Remedy what to do.
	Seen   string `json:"seen"`
	Means  string `json:"means,omitempty"`
	Remedy string `json:"remedy,omitempty"`
	// Commands carry the remedy out. They are printed, and never run.
	Commands []string `json:"commands,omitempty"`
}

// machine is the Device of findings about the machine.
const machine = -1

func ok(check, format string, args ...any) finding {
	return finding{Check: check, Severity: fine, Device: machine, Seen: fmt.Sprintf(format, args...)}
}

func (f finding) on(device int) finding {
	f.Device = device
	return f
}

func worst(all []finding) severity {
	for _, s := range []severity{problem, warning, note} {
		if slices.ContainsFunc(all, func(f finding) bool { return f.Severity == s }) {
			return s
		}
	}
	return fine
}

// writeFindings writes a line for each finding, and under it what it means.
func writeFindings(out io.Writer, all []finding) {
	for _, f := range all {
		check := f.Check
		if f.Device != machine {
			check = fmt.Sprintf("device %d: %s", f.Device, check)
		}
		fmt.Fprintf(out, "%-8s %s: %s\n", f.Severity, check, f.Seen)
		if f.Means != "" {
			fmt.Fprintf(out, "         means: %s\n", f.Means)
		}
		if f.Remedy != "" {
			fmt.Fprintf(out, "         do: %s\n", f.Remedy)
		}
	}
	counts := map[severity]int{}
	for _, f := range all {
		counts[f.Severity]++
	}
	fmt.Fprintf(out, "\n%d looked at: %d ok, %d notes, %d warnings, %d problems\n", len(all), counts[fine], counts[note], counts[warning], counts[problem])
}

// writeCommands writes the commands of all findings, each with its reason.
func writeCommands(out io.Writer, all []finding) {
	n := 0
	for _, f := range all {
		if len(f.Commands) > 0 {
			n++
			fmt.Fprintf(out, "# %s: %s\n%s\n", f.Check, f.Seen, strings.Join(f.Commands, "\n"))
		}
	}
	if n == 0 {
		fmt.Fprintln(out, "# nothing that a command mends")
	}
}
