//go:build !linux

package sock

import (
	"context"
	"errors"
)

// Process is another process.
type Process struct{}

// Process opens the process at the other end.
func (c *Conn) Process() (*Process, error) { return nil, errors.ErrUnsupported }

// Wait waits until the process has ended.
func (p *Process) Wait(context.Context) error { return errors.ErrUnsupported }

// ProcessOf returns the process of a descriptor.
func ProcessOf(int) (*Process, error) { return nil, errors.ErrUnsupported }

// FD returns the number of another descriptor of the process.
func (p *Process) FD() (int, error) { return -1, errors.ErrUnsupported }

// Dup returns another descriptor of the process.
func (p *Process) Dup() (*Process, error) { return nil, errors.ErrUnsupported }

// Close closes the descriptor.
func (p *Process) Close() error { return nil }

// Self identifies this process.
func Self() (ProcessID, error) { return ProcessID{}, errors.ErrUnsupported }

// Open opens a process.
func (id ProcessID) Open() (*Process, error) { return nil, errors.ErrUnsupported }

// Started returns when a process began.
func Started(int) (uint64, error) { return 0, errors.ErrUnsupported }
