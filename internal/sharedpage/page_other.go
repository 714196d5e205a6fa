//go:build !linux

package sharedpage

import "errors"

// New makes a page.
func New() (*Page, int, error) { return nil, -1, errors.ErrUnsupported }

// Open maps another process's page.
func Open(int) (*Page, error) { return nil, errors.ErrUnsupported }

// Close takes the page out of this process.
func (p *Page) Close() error { return nil }
