package handles

import (
	"crypto/rand"
	"fmt"
	"os"
	"sync"
)

// Process names the process that made something. The pid alone would not: the
// system gives it to another process later.
type Process struct {
	// PID is the process's number as it sees itself, which other pid
	// namespaces number otherwise.
	PID uint32
	// Instance is 128 random bits, drawn once in the life of a process.
	Instance [16]byte
}

var self = sync.OnceValue(func() Process {
	p := Process{PID: uint32(os.Getpid())}
	_, _ = rand.Read(p.Instance[:]) // never fails
	return p
})

// Self is this process.
func Self() Process { return self() }

// String writes "process 4711 (0f1e...)".
func (p Process) String() string { return fmt.Sprintf("process %d (%x)", p.PID, p.Instance) }
