//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"encoding/json"
	"strconv"
	"strings"
)

// visibleEnv hides devices, as from the vendor's driver. Go programs that choose the
// software driver ignore it: with no device visible they choose that driver.
const visibleEnv = "CUDA_VISIBLE_DEVICES"

// visible returns the ordinals that a list names, up to the first that is no device or is
// named twice, as the vendor's driver reads it.
func visible(list string, devices int) []int {
	seen := []int{}
	named := map[int]bool{}
	for word := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(word))
		if err != nil || n < 0 || n >= devices || named[n] {
			break
		}
		named[n] = true
		seen = append(seen, n)
	}
	return seen
}

// hide adds the visible devices to the description of a machine that names none. It leaves
// a description that it cannot read, which is refused with its error elsewhere. It reports
// whether a device is visible.
func hide(machine, list string) (described string, some bool) {
	var o map[string]json.RawMessage
	var devices []json.RawMessage
	if machine == "" {
		machine = "{}"
	}
	if json.Unmarshal([]byte(machine), &o) != nil || o == nil || o["Visible"] != nil {
		return machine, true
	}
	if o["Devices"] != nil && json.Unmarshal(o["Devices"], &devices) != nil {
		return machine, true
	}
	seen := visible(list, max(1, len(devices)))
	text, err := json.Marshal(seen)
	if err != nil {
		return machine, true
	}
	o["Visible"] = text
	all, err := json.Marshal(o)
	if err != nil {
		return machine, true
	}
	return string(all), len(seen) > 0
}
