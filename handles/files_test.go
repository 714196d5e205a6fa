//go:build linux

package handles_test

import (
	"os"
	"slices"
	"strings"
)

// ownFiles is where this process's descriptors lead, those left out that the Go
// runtime makes when it first needs them and those that the real driver keeps
// for itself. What this package holds of the driver's is counted by OpenFDs.
func ownFiles() (links []string) {
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	driver := false
	for _, f := range all {
		link, err := os.Readlink("/proc/self/fd/" + f.Name())
		if err != nil { // the listing's own
			continue
		}
		driver = driver || strings.HasPrefix(link, "/dev/nvidia")
		links = append(links, link)
	}
	links = slices.DeleteFunc(links, func(l string) bool {
		return strings.HasPrefix(l, "anon_inode:[event") || // the runtime's poller
			driver && (strings.HasPrefix(l, "/dev/") || strings.HasPrefix(l, "/proc/") || strings.HasPrefix(l, "pipe:") || strings.HasPrefix(l, "anon_inode:"))
	})
	slices.Sort(links)
	return links
}
