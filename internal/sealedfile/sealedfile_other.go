//go:build !linux

package sealedfile

import "errors"

// New needs Linux.
func New(string, []byte) (int, error) { return -1, errors.ErrUnsupported }

// Read needs Linux.
func Read(int, int) ([]byte, error) { return nil, errors.ErrUnsupported }
