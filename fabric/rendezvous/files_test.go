package rendezvous

import (
	"os"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/fd"
)

// duplicate is another descriptor of a file.
func duplicate(f *os.File) (*peer.FD, error) {
	n, err := fd.Dup(int(f.Fd()))
	if err != nil {
		return nil, err
	}
	return peer.NewFD(n)
}
