// Package diagnose finds what keeps a process from using fabric handles, and what an
// administrator can do about it. Package fabric shows the findings to users, and
// errors of memory with fabric handles carry them.
package diagnose

import (
	"fmt"
	"strings"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// Severity is how much a finding matters.
type Severity string

const (
	// OK means that all is as it should be.
	OK Severity = "ok"
	// Note is worth knowing; there is nothing to do.
	Note Severity = "note"
	// Warning means that fabric handles may work, but not as expected.
	Warning Severity = "warning"
	// Problem means that fabric handles cannot work.
	Problem Severity = "problem"
)

// Check names a check.
type Check string

const (
	CheckMajor      Check = "major"
	CheckCount      Check = "channel count"
	CheckNodes      Check = "nodes"
	CheckAccessible Check = "accessible channels"
	CheckChannel0   Check = "channel 0"
	CheckAttribute  Check = "attribute"
	CheckNVML       Check = "nvml"
	CheckState      Check = "fabric state"
	CheckStatus     Check = "fabric status"
	CheckHealth     Check = "fabric health"
	CheckCluster    Check = "cluster"
	CheckClique     Check = "clique"
	CheckCreate     Check = "create"
	CheckExport     Check = "export"
	CheckImport     Check = "import"
)

// Machine is the Device of a finding that concerns no device in particular.
const Machine = -1

// Finding is the result of a check.
type Finding struct {
	Check    Check
	Severity Severity
	// Device is the ordinal of the device, or Machine.
	Device int
	// Text says what was found, Remedy what to do about it, "" if there is nothing
	// to do.
	Text   string
	Remedy string
	// Commands carry out the remedy as root, as far as commands can.
	Commands []string
}

// String writes "problem: major: what was found; what to do".
func (f Finding) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s: ", f.Severity, f.Check)
	if f.Device != Machine {
		fmt.Fprintf(&b, "device %d: ", f.Device)
	}
	b.WriteString(f.Text)
	if f.Remedy != "" {
		b.WriteString("; " + f.Remedy)
	}
	return b.String()
}

// Error is the cause of a failed creation or import.
type Error struct {
	Findings []Finding
	// Here is the place of this process on the fabric, "" if it does not matter.
	Here string
}

// Error writes the findings that matter on one line.
func (e *Error) Error() string {
	var all []string
	if e.Here != "" {
		all = append(all, e.Here)
	}
	for _, f := range e.Findings {
		if f.Severity == Problem || f.Severity == Warning {
			text := f.Text
			if f.Remedy != "" {
				text += " (" + f.Remedy + ")"
			}
			all = append(all, text)
		}
	}
	if len(all) == 0 {
		return "nothing that this process can see explains it: look at the logs of nvidia-imex and of the kernel"
	}
	return strings.Join(all, "; ")
}

// explained reports whether the findings may explain a result of a creation. Other
// results have other causes.
func explained(r driver.Result) bool { return r == driver.NotPermitted || r == driver.NotSupported }
