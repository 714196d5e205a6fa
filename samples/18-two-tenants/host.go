package main

import (
	"bytes"
	"os"
	"strconv"
	"strings"
)

// resident returns how much host memory the process has, 0 if that is not known.
func resident() int {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	pages, err := strconv.Atoi(strings.Fields(string(text))[1])
	if err != nil {
		return 0
	}
	return pages * os.Getpagesize()
}

// available returns how much host memory the machine has for processes, 0 if that is not known.
func available() int {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	for line := range bytes.Lines(text) {
		if f := strings.Fields(string(line)); len(f) == 3 && f[0] == "MemAvailable:" {
			kib, _ := strconv.Atoi(f[1])
			return kib << 10
		}
	}
	return 0
}
