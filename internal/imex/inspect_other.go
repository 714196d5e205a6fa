//go:build !linux

package imex

import "errors"

func (*Channel) inspect() error { return errors.ErrUnsupported }
