package driver

import (
	"fmt"
	"strings"
)

// Call names a driver entry point.
type Call int

//go:generate go run ./gen

// String is the entry point's name: "cuMemCreate". Where the library uses two
// forms of one entry point, the older one ends in "_v1".
func (c Call) String() string {
	if c < 0 || int(c) >= CallCount {
		return fmt.Sprintf("Call(%d)", int(c))
	}
	return calls[c].name
}

// Entry is the name that cuGetProcAddress knows: which form it gives is decided
// by the version.
func (c Call) Entry() string { return strings.TrimSuffix(c.String(), "_v1") }

// Version is the CUDA version that first had the entry point in the declared
// form, as the driver counts: 1000 times the major number plus 10 times the
// minor one.
func (c Call) Version() int32 { return calls[c].version }

// CallByName finds an entry point by its name.
func CallByName(name string) (Call, bool) {
	for c := range calls {
		if calls[c].name == name {
			return Call(c), true
		}
	}
	return 0, false
}

// VersionString writes a driver version for people: 12020 is "12.2".
func VersionString(v int32) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }
