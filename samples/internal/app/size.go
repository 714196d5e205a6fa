package app

import (
	"fmt"
	"strconv"
	"strings"
)

// Size declares a flag that takes a size in bytes, such as 65536, 64KiB or 4MiB,
// of 1 byte to 1 GiB.
func (e *Env) Size(name, value, usage string) *int {
	n := new(int)
	set := func(text string) (err error) {
		*n, err = parseSize(text)
		return err
	}
	if err := set(value); err != nil {
		panic(err)
	}
	e.Flags.Func(name, fmt.Sprintf("%s (default %s)", usage, value), set)
	return n
}

// largest bounds a size: samples use it for ordinary host memory.
const largest = 1 << 30

func parseSize(text string) (int, error) {
	unit, number := 1, text
	for suffix, bytes := range map[string]int{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30} {
		if n, ok := strings.CutSuffix(text, suffix); ok {
			number, unit = n, bytes
		}
	}
	n, err := strconv.Atoi(number)
	if err != nil || n <= 0 || n > largest/unit {
		return 0, fmt.Errorf("%q: use a positive size up to 1GiB, such as 64KiB or 4MiB", text)
	}
	return n * unit, nil
}
