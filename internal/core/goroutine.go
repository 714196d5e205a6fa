package core

import (
	"bytes"
	"runtime"
	"strconv"
)

// Goroutine returns the number of the calling goroutine. Go has it only in
// the first line of its stack: "goroutine 12 [running]:".
func Goroutine() uint64 {
	var line [40]byte
	text := bytes.TrimPrefix(line[:runtime.Stack(line[:], false)], []byte("goroutine "))
	number, _, _ := bytes.Cut(text, []byte(" "))
	n, _ := strconv.ParseUint(string(number), 10, 64)
	return n
}
