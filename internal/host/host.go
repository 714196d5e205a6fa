// Package host says what the operating system knows of the host's memory and threads: the
// page size, the NUMA nodes, whether addresses are mapped, the number of a thread.
package host

import "os"

// PageSize is the operating system's page size in bytes.
func PageSize() uint64 { return uint64(os.Getpagesize()) }
