package inspect

import (
	"strconv"
	"strings"
)

// Frame splits a frame of a Stack, which reads "function (file:line)". Without a line, or
// without a file, line is 0 and file may be empty.
func Frame(text string) (function, file string, line int) {
	function, place, _ := strings.Cut(text, " (")
	place = strings.TrimSuffix(place, ")")
	at := strings.LastIndexByte(place, ':')
	if at < 0 {
		return function, place, 0
	}
	line, err := strconv.Atoi(place[at+1:])
	if err != nil {
		return function, place, 0
	}
	return function, place[:at], line
}
