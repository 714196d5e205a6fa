//go:build !unix

package serve

import (
	"io/fs"

	"github.com/cuvmm/cuvmm/internal/errs"
)

func owned(folder string, _ fs.FileInfo) error {
	return errs.New(errs.Failure{Op: "serve.Offer", Kind: errs.NotSupported, Asked: "a socket in " + folder, Hint: "mount serve.Handler instead"})
}

func refused(error) bool { return false }
