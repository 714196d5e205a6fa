package handles

import (
	"crypto/rand"
	"fmt"
	"os"
	"sync"
)

// Process identifies a process. The pid alone does not, since the system reuses it.
type Process struct {
	// PID is the process's number in its own pid namespace.
	PID uint32
	// Instance is 128 random bits, drawn once in the life of a process.
	Instance [16]byte
}

var self = sync.OnceValue(func() Process {
	p := Process{PID: uint32(os.Getpid())}
	_, _ = rand.Read(p.Instance[:]) // never fails
	return p
})

// Self returns this process.
func Self() Process { return self() }

// String writes "process 4711 (0f1e...)".
func (p Process) String() string { return fmt.Sprintf("process %d (%x)", p.PID, p.Instance) }
