package main

import (
	"io"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// plain writes text that other processes chose, such as the names of processes and devices, so that
// it cannot control the terminal. Each write has whole characters.
type plain struct{ to io.Writer }

func (p plain) Write(text []byte) (int, error) {
	if _, err := io.WriteString(p.to, errs.Plain(string(text))); err != nil {
		return 0, err
	}
	return len(text), nil
}
