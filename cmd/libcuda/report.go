//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

// #include "libcuda.h"
import "C"

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/environ"
)

// reportEnv names a file to which a program that ends adds what the software driver saw: what
// results cannot say, races, and what the program left. "-" is standard error. Nothing is
// written if there is nothing to say, so a test can ask whether the file is there.
const reportEnv = "CUVMM_REPORT"

//export cuvmm_report
func cuvmm_report() {
	name := environ.Get(reportEnv)
	if machine.m == nil || name == "" {
		return
	}
	text := findings(machine.m)
	if text == "" {
		return
	}
	var to io.Writer = os.Stderr
	if name != "-" {
		f, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o666)
		if err != nil {
			complain("%s: %v", reportEnv, err)
			return
		}
		defer f.Close()
		to = f
	}
	if _, err := io.WriteString(to, text); err != nil {
		complain("%s: %v", reportEnv, err)
	}
}

// goStacks are the stacks in the text of races and of what is left.
var goStacks = regexp.MustCompile(`, (submitted|created) at:\n(\t.*\n?)*`)

// findings are a machine's log, its races and what is left on it, a line each. The
// contexts that a program leaves to its end are nothing to report, and stacks are Go's.
func findings(m *sim.Machine) (text string) {
	add := func(what, found string) {
		found = strings.ReplaceAll(goStacks.ReplaceAllString(found, "; "), "\n", " ")
		text += fmt.Sprintf("%d: %s: %s\n", os.Getpid(), what, strings.TrimRight(found, "; "))
	}
	for _, line := range m.Log() {
		add("log", line)
	}
	for _, race := range m.Races() {
		add("race", race.String())
	}
	for _, leak := range m.Leaks() {
		if leak.Kind != sim.KindContext {
			add("left", leak.String())
		}
	}
	return text
}
