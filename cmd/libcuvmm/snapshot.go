//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"bytes"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/torch"
)

// torchSnapshot is the process's memory, of all pools and segments, in the form of
// PyTorch's memory snapshots.
func torchSnapshot() ([]byte, error) {
	open.Lock()
	of := sys
	open.Unlock()
	if of == nil {
		return nil, nil
	}
	s, err := inspect.Take(of)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = torch.Write(&b, s)
	return b.Bytes(), err
}
