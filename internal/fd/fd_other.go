//go:build !linux

package fd

import "errors"

// Take checks a descriptor.
func Take(int) error { return errors.ErrUnsupported }

// Dup is another descriptor of the same file.
func Dup(int) (int, error) { return -1, errors.ErrUnsupported }

// Close gives the number back.
func Close(int) error { return errors.ErrUnsupported }

// Limit is how many descriptors this process may have open.
func Limit() (uint64, error) { return 0, errors.ErrUnsupported }
