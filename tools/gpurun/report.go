//go:build unix

package main

import (
	"fmt"
	"io"
	"regexp"
	"strings"
	"time"
)

type verdict string

const (
	passed  verdict = "passed"
	failed  verdict = "FAILED"
	nothing verdict = "nothing"
)

// A report is what one run printed and how it ended. Subtests count as tests.
type report struct {
	output                  string
	passed, failed, skipped int
	benchmarks              []string // the result lines
	skips, failures         []outcome

	verdict verdict
	note    string
	took    time.Duration
}

// An outcome is a test and what it logged.
type outcome struct{ test, said string }

var (
	startLine  = regexp.MustCompile(`^(?:=== (?:RUN|NAME|CONT)\s+(\S+)|(Benchmark\S+))\s*$`)
	otherLine  = regexp.MustCompile(`^=== `)
	resultLine = regexp.MustCompile(`--- (PASS|FAIL|SKIP|BENCH): (\S+)`)
	benchLine  = regexp.MustCompile(`^Benchmark\S*\s+\d+\s.*/\w+`)
	crashLine  = regexp.MustCompile(`^(panic:|fatal error:|SIG[A-Z]+|unexpected fault|runtime:)`)
)

// parse reads the output of a test binary that ran with -test.v. A program's
// output has nothing of the kind and comes back as it is.
func parse(output string) report {
	r := report{output: output}
	said := map[string]*strings.Builder{}
	test := ""
	for line := range strings.Lines(output) {
		if m := startLine.FindStringSubmatch(line); m != nil {
			test = m[1] + m[2] // a benchmark's name stands alone
			continue
		}
		if m := resultLine.FindStringSubmatch(line); m != nil {
			test = m[2]
			o := outcome{test: test}
			if b := said[test]; b != nil {
				o.said = b.String()
			}
			switch m[1] {
			case "PASS":
				r.passed++
			case "FAIL":
				r.failed++
				r.failures = append(r.failures, o)
			case "SKIP":
				r.skipped++
				r.skips = append(r.skips, o)
			}
			continue
		}
		if benchLine.MatchString(line) {
			r.passed++
			r.benchmarks = append(r.benchmarks, strings.TrimRight(line, "\n"))
			continue
		}
		if test == "" || otherLine.MatchString(line) {
			continue
		}
		if said[test] == nil {
			said[test] = &strings.Builder{}
		}
		said[test].WriteString(line)
	}
	return r
}

// judge decides how a run went: err is how its process ended.
func (r *report) judge(kind string, err error, bench bool) {
	r.verdict = passed
	if kind == tests {
		r.note = fmt.Sprintf(": %d passed, %d failed, %d skipped", r.passed, r.failed, r.skipped)
		if r.passed+r.failed+r.skipped == 0 {
			r.verdict = nothing
			switch {
			case bench:
				r.note = ": no benchmarks"
			case strings.Contains(r.output, "no tests to run"):
				r.note = ": no tests"
			default: // a TestMain that never came to its tests, say
				r.verdict, r.note = failed, ": no test ran"
			}
		}
	}
	if err != nil {
		r.verdict = failed
		r.note += fmt.Sprintf(", %v", err)
	}
	if r.failed > 0 {
		r.verdict = failed
	}
}

// What is printed of a run at most: the rest is in the log.
const (
	shownFailures = 12
	shownLines    = 25
	shownNames    = 3
)

// print writes the one line of a run, and below it why tests were skipped or failed. It
// shows a program's output if the program failed or was named.
func (r *report) print(w io.Writer, j job, named bool) {
	fmt.Fprintf(w, "%-7s %s (%s)%s, %s\n", r.verdict, j.pkg, j.kind, r.note, r.took.Round(10*time.Millisecond))
	for _, line := range skipReasons(r.skips) {
		fmt.Fprintf(w, "    %s\n", line)
	}
	failures := leaves(r.failures)
	for i, f := range failures {
		if i == shownFailures {
			fmt.Fprintf(w, "    ... and %d more failed: see the log\n", len(failures)-i)
			break
		}
		fmt.Fprintf(w, "    failed %s\n%s", f.test, indent(head(f.said, shownLines)))
	}
	for _, b := range r.benchmarks {
		fmt.Fprintln(w, b)
	}
	switch {
	case r.verdict == failed && r.failed == 0:
		fmt.Fprint(w, indent(r.cause()))
	case j.kind == program && named:
		fmt.Fprint(w, r.output)
	}
}

// skipReasons returns one line for each reason, with how many tests gave it.
func skipReasons(skips []outcome) []string {
	byReason := map[string][]string{}
	var order []string
	for _, s := range skips {
		reason := lastLine(s.said)
		if byReason[reason] == nil {
			order = append(order, reason)
		}
		byReason[reason] = append(byReason[reason], s.test)
	}
	for i, reason := range order {
		tests := byReason[reason]
		names := strings.Join(tests[:min(len(tests), shownNames)], ", ")
		if more := len(tests) - shownNames; more > 0 {
			names += fmt.Sprintf(" and %d more", more)
		}
		order[i] = fmt.Sprintf("skipped: %s (%s)", reason, names)
	}
	return order
}

// leaves drops the tests that failed only because a subtest did.
func leaves(failures []outcome) []outcome {
	var out []outcome
	for i, f := range failures {
		// A parent's result comes right before those of its subtests.
		if f.said == "" && i+1 < len(failures) && strings.HasPrefix(failures[i+1].test, f.test+"/") {
			continue
		}
		out = append(out, f)
	}
	return out
}

// cause returns the part of the output that says why a run failed without a
// failed test: from the crash on, or else the end.
func (r *report) cause() string {
	lines := strings.SplitAfter(r.output, "\n")
	for i, line := range lines {
		if crashLine.MatchString(line) {
			return head(strings.Join(lines[i:], ""), 60)
		}
	}
	return strings.Join(lines[max(0, len(lines)-30):], "")
}

func head(s string, n int) string {
	lines := strings.SplitAfterN(s, "\n", n+1)
	if len(lines) <= n || lines[n] == "" {
		return s
	}
	return strings.Join(lines[:n], "") + "... (the rest is in the log)\n"
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	if s == "" {
		return "no reason given"
	}
	return strings.TrimSpace(s[strings.LastIndex(s, "\n")+1:])
}

func indent(s string) string {
	var b strings.Builder
	for line := range strings.Lines(s) {
		b.WriteString("    " + strings.TrimRight(line, "\n") + "\n")
	}
	return b.String()
}
