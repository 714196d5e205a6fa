//go:build !linux

package drivertest

import (
	"errors"
	"os"
)

// What the rules need of the system, as far as it goes without Linux.

func duplicate(int) (int, error)     { return 0, errors.ErrUnsupported }
func closeDescriptor(int) error      { return errors.ErrUnsupported }
func closedOnExec(int) (bool, error) { return false, errors.ErrUnsupported }
func sizeOf(int) (int64, error)      { return 0, errors.ErrUnsupported }

func socketPair() (near, far *os.File, err error) { return nil, nil, errors.ErrUnsupported }
func sendDescriptor(*os.File, int) error          { return errors.ErrUnsupported }
func receiveDescriptor(*os.File) (int, error)     { return 0, errors.ErrUnsupported }

func memoryFile(int64) (*os.File, error)    { return nil, errors.ErrUnsupported }
func mapFile(*os.File, int) ([]byte, error) { return nil, errors.ErrUnsupported }

// pageable is n bytes that the Go collector may own: no driver but the software
// one is there to take them.
func pageable(n int) ([]byte, error) { return make([]byte, n), nil }

func freePageable([]byte) error { return nil }
