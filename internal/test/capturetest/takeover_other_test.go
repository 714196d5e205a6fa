//go:build !linux

package capturetest

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/publish"
)

func sharedFolder(*testing.T) string { return "" }

// takesOver is refused where no process can be waited for.
func takesOver(w *world) func() error {
	s, f := w.server(), w.follower()
	return func() error {
		if _, err := publish.TakeOver(w.soon(), s, f); !errors.Is(err, cuda.ErrNotSupported) {
			return fmt.Errorf("a follower was taken over where no process can be waited for: %w", err)
		}
		return nil
	}
}
