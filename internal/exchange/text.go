package exchange

import (
	"fmt"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/sealedfile"
)

// MaxText bounds a text that travels as a file beside memory, such as a manifest, in bytes.
const MaxText = 64 << 20

// TextFile makes a file of such a text, which nothing can change any more. The caller closes it.
func TextFile(op, what string, text []byte) (*peer.FD, error) {
	if len(text) > MaxText {
		return nil, errs.PeerInvalid(op, fmt.Sprintf("%s of %s", what, errs.Bytes(len(text))), fmt.Sprintf("use at most %s, and divide the memory if it needs more", errs.Bytes(MaxText)))
	}
	n, err := sealedfile.New("cuvmm text", text)
	if err != nil {
		return nil, errs.SystemCall(op, "a file for "+what, err)
	}
	return peer.NewFD(n)
}

// ReadText reads such a file of another process.
func ReadText(op, what string, f *peer.FD) (text []byte, err error) {
	err = f.Use(func(n int) error {
		text, err = sealedfile.Read(n, MaxText)
		return err
	})
	if err != nil {
		return nil, errs.PeerCause(err, op, nil, what, fmt.Sprintf("pass a sealed memory file of at most %s", errs.Bytes(MaxText)))
	}
	link.Of(f).SetForeign(false) // it is a memory file, whose close takes no time
	return text, nil
}
