//go:build unix

package main

import "syscall"

func limitOf(r resource) (uint64, error) {
	var l syscall.Rlimit
	err := syscall.Getrlimit(map[resource]int{openedFiles: syscall.RLIMIT_NOFILE, addresses: syscall.RLIMIT_AS}[r], &l)
	return l.Cur, err
}

// readAndWrite returns an error if this process may not read and write the file.
func readAndWrite(path string) error {
	const both = 4 | 2 // R_OK and W_OK of access(2)
	return syscall.Access(path, both)
}
