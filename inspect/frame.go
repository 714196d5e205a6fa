package inspect

import (
	"strconv"
	"strings"
)

// Frame takes a function of a Stack apart: "function (file:line)".
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
