package main

import (
	"fmt"
	"strconv"
	"strings"
)

// largestStep bounds what is read at a time: it is ordinary host memory.
const largestStep = 1 << 30

// parseSize reads a size such as 65536, 64KiB, 4MiB or 1GiB.
func parseSize(text string) (int, error) {
	unit := 1
	number := text
	for suffix, bytes := range map[string]int{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30} {
		if n, ok := strings.CutSuffix(text, suffix); ok {
			number, unit = n, bytes
		}
	}
	n, err := strconv.Atoi(number)
	if err != nil || n <= 0 || n > largestStep/unit {
		return 0, fmt.Errorf("step %q: use a positive size up to 1GiB, such as 64KiB or 4MiB", text)
	}
	return n * unit, nil
}
