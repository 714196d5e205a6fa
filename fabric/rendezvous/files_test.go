package rendezvous

import (
	"os"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/fd"
)

// duplicate is another descriptor of a file.
func duplicate(f *os.File) (*handles.FD, error) {
	n, err := fd.Dup(int(f.Fd()))
	if err != nil {
		return nil, err
	}
	return handles.NewFD(n)
}
