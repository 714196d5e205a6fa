package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// severity ranks findings.
type severity string

const (
	fine    severity = "ok"
	note    severity = "note"    // worth knowing
	warning severity = "warning" // a feature is missing, or does not behave as expected
	problem severity = "problem" // the library cannot work
)

// finding is the result of one check.
type finding struct {
	Check    string   `json:"check"`
	Severity severity `json:"severity"`
	// Device is the device's ordinal, or -1 if the finding is about the machine.
	Device int `json:"device"`
	// Simulated findings describe the software driver's machine, not this one.
	Simulated bool `json:"simulated,omitempty"`
	// Seen is the observation, Means its consequence for a feature, and Remedy what to
	// do about it.
	Seen   string `json:"seen"`
	Means  string `json:"means,omitempty"`
	Remedy string `json:"remedy,omitempty"`
	// Commands carry out the remedy. They are printed, never run.
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

// title returns the check and its device.
func (f finding) title() string {
	title := f.Check
	if f.Device != machine {
		title = fmt.Sprintf("device %d: %s", f.Device, title)
	}
	if f.Simulated {
		title = "simulated " + title
	}
	return title
}

// writeFindings writes each finding with its meaning and remedy, and a summary.
func writeFindings(to io.Writer, all []finding) {
	out := plain{to}
	for _, f := range all {
		fmt.Fprintf(out, "%-8s %s: %s\n", f.Severity, f.title(), f.Seen)
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
	fmt.Fprintf(out, "\n%d checks: %d ok, %d notes, %d warnings, %d problems\n", len(all), counts[fine], counts[note], counts[warning], counts[problem])
}

// writeCommands writes the commands of all findings as a script, each after its reason
// as a comment.
func writeCommands(to io.Writer, all []finding) {
	out := plain{to}
	n := 0
	for _, f := range all {
		if len(f.Commands) > 0 {
			n++
			reason := f.title() + ": " + f.Seen
			if f.Means != "" {
				reason += "; " + f.Means
			}
			fmt.Fprintf(out, "# %s\n%s\n", strings.ReplaceAll(reason, "\n", "\n# "), strings.Join(f.Commands, "\n"))
		}
	}
	if n == 0 {
		fmt.Fprintln(out, "# nothing to fix by a command")
	}
}
