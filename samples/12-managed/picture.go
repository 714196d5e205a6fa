package main

import (
	"fmt"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/cuvmm/cuvmm/samples/internal/app"
)

// draw prints what the driver knows of the layers and the scratch.
func draw(e *app.Env, when string, weights []*managed.Array[float32], scratch *managed.Buffer) error {
	var line strings.Builder
	for i, w := range weights {
		p, err := picture(w.Buffer().Range)
		if err != nil {
			return err
		}
		fmt.Fprintf(&line, "layer %d [%s]  ", i, p)
	}
	p, err := picture(scratch.Range)
	if err != nil {
		return err
	}
	e.Line("  "+when, "%sscratch [%s]", line.String(), p)
	return nil
}

// pieces is how many characters a picture has.
const pieces = 8

// picture returns a character for each piece of a range. The driver tells where
// pages were last prefetched to and where they are preferred; it does not tell
// where they went when they were touched.
func picture(r managed.Range) (string, error) {
	var p []byte
	for i := range pieces {
		piece, err := r.Slice(i*r.Len()/pieces, (i+1)*r.Len()/pieces)
		if err != nil {
			return "", err
		}
		c, err := sign(piece)
		if err != nil {
			return "", err
		}
		p = append(p, c)
	}
	return string(p), nil
}

func sign(r managed.Range) (byte, error) {
	last, err := r.LastPrefetch()
	if err != nil {
		return 0, err
	}
	preferred, err := r.Preferred()
	if err != nil {
		return 0, err
	}
	mostly, err := r.ReadMostly()
	if err != nil {
		return 0, err
	}
	switch {
	case last.Type == cuda.LocationDevice:
		return 'D', nil
	case last.Type != cuda.LocationNone:
		return 'H', nil
	case preferred.Type == cuda.LocationDevice:
		return 'd', nil
	case preferred.Type != cuda.LocationNone:
		return 'h', nil
	case mostly:
		return 'r', nil
	}
	return '.', nil
}
