package publish

import (
	"fmt"
)

// Access is what a client may do with a publication.
type Access uint8

// The values are part of the protocol.
const (
	// NoAccess: the publication is not listed, and following it returns ErrUnknown.
	NoAccess Access = iota
	// ReadAccess: it can be followed with ReadOnly.
	ReadAccess
	// WriteAccess: it can be followed for reading and writing.
	WriteAccess
)

// String returns "none", "read" or "write".
func (a Access) String() string {
	switch a {
	case NoAccess:
		return "none"
	case ReadAccess:
		return "read"
	case WriteAccess:
		return "write"
	}
	return fmt.Sprintf("Access(%d)", uint8(a))
}
