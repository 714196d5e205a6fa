//go:build !linux

package keeper

import (
	"errors"
	"os"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// Exec needs Linux.
func (k *Keeper) Exec(path string, args, environment []string, extra ...*os.File) error {
	return errs.SystemCall("keeper.Keeper.Exec", path, errors.ErrUnsupported)
}

// Inherit needs Linux: elsewhere there is no keeper to inherit.
func Inherit() (*Keeper, error) { return nil, nil }

// Store needs Linux: elsewhere no service manager keeps files.
func (k *Keeper) Store() error { return nil }

// Passed needs Linux: elsewhere no service manager passes files.
func Passed() map[string]int { return nil }
