package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/load"
	"github.com/cuvmm/cuvmm/vmm"
)

const loadUsage = `usage: cuvmm load [flags] FILE...

Prints the tensors of files in the safetensors format, or of folders with their index, checks them,
and measures how fast they are loaded into the memory of a device: reading alone, copying alone, and
both. A tensor that has another digest than its file declares is an error.

Flags:
`

// modelInfo describes a file or a folder.
type modelInfo struct {
	File     string            `json:"file"`
	Bytes    int               `json:"bytes"` // of the tensors
	Metadata map[string]string `json:"metadata,omitempty"`
	Tensors  []handles.Tensor  `json:"tensors"`
	Measured *loadRates        `json:"measured,omitempty"`
}

// loadRates are in bytes a second. Load is the first pass, which also pins memory, and Again the
// second. They are 0 if the device has too little free memory.
type loadRates struct {
	Device int     `json:"device"`
	Load   float64 `json:"load"`
	Again  float64 `json:"again"`
	Read   float64 `json:"read"`
	Copy   float64 `json:"copy"`
}

func loadFiles(f *flag.FlagSet) func(args []string, out io.Writer, h host) (int, error) {
	asJSON := f.Bool("json", false, "print JSON")
	list := f.Bool("list", false, "list the tensors, and read and measure nothing")
	ordinal := f.Int("device", 0, "the device to load to")
	driver := driverFlag(f)
	return func(args []string, out io.Writer, h host) (int, error) {
		if err := checkChoice(*driver); err != nil {
			return exitUsage, err
		}
		if len(args) == 0 {
			return exitUsage, errors.New("no files: see cuvmm load -h")
		}
		var all []modelInfo
		for _, path := range args {
			i, err := inspectModel(h, path, *driver, *ordinal, *list)
			if err != nil {
				return exitFailed, err
			}
			if !*asJSON {
				i.write(plain{out})
			}
			all = append(all, i)
		}
		if *asJSON {
			if err := writeJSON(out, all); err != nil {
				return exitFailed, err
			}
		}
		return exitOK, nil
	}
}

func inspectModel(h host, path, driver string, ordinal int, list bool) (i modelInfo, err error) {
	defer h.progress.end()
	m, err := load.OpenSafetensors(path)
	if err != nil {
		return i, err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	l, err := m.Layout(0)
	if err != nil {
		return i, err
	}
	i = modelInfo{File: path, Metadata: m.Metadata(), Tensors: l.Tensors}
	for _, t := range l.Tensors {
		i.Bytes += t.Size()
	}
	if list || i.Bytes == 0 {
		return i, nil
	}
	h.progress.step("loading %s", path)
	i.Measured = &loadRates{Device: ordinal}
	if err := i.Measured.load(h, driver, m, l, i.Bytes); err != nil {
		return i, err
	}
	h.progress.step("reading %s", path)
	i.Measured.Read, err = rateOf(i.Bytes, func() error {
		made, err := m.Verify(context.Background(), load.Options{}, l)
		if err == nil {
			i.Tensors = made.Tensors
		}
		return err
	})
	return i, err
}

// rateOf measures bytes a second.
func rateOf(bytes int, f func() error) (float64, error) {
	start := time.Now()
	err := f()
	return float64(bytes) / time.Since(start).Seconds(), err
}

// load measures loads and copies, if the device has room.
func (r *loadRates) load(h host, driver string, m *load.Model, l *handles.Manifest, bytes int) (err error) {
	sys, err := h.open(driver)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	dev, err := sys.Device(r.Device)
	if err != nil {
		return err
	}
	if free, _, err := dev.MemoryInfo(); err != nil || free < l.Bytes {
		return err
	}
	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stream.Close()) }()
	b, err := vmm.NewBuffer(dev, vmm.BufferOptions{Reserve: max(l.Bytes, 1)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	if err := b.Resize(nil, l.Bytes); err != nil {
		return err
	}
	all := func() error {
		_, err := m.LoadAll(context.Background(), load.Options{}, stream, l, b.Ptr(), b.Len())
		return err
	}
	if r.Load, err = rateOf(bytes, all); err != nil {
		return err
	}
	if r.Again, err = rateOf(bytes, all); err != nil {
		return err
	}
	r.Copy, err = copyRate(stream, b)
	return err
}

// copyRate measures copies of pinned memory to a buffer.
func copyRate(stream *cuda.Stream, b *vmm.Buffer) (rate float64, err error) {
	const piece = 64 << 20
	host, err := b.Device().NewHostBuffer(min(piece, max(b.Len(), 1)))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, host.Close()) }()
	return rateOf(b.Len(), func() error {
		for at := 0; at < b.Len(); at += piece {
			part, err := host.Slice(0, min(piece, b.Len()-at))
			if err == nil {
				err = stream.CopyFromHost(b.Ptr()+cuda.Ptr(at), part)
			}
			if err != nil {
				return err
			}
		}
		return stream.Synchronize()
	})
}

func (i *modelInfo) write(out io.Writer) {
	fmt.Fprintf(out, "%s: %d tensors, %s\n", i.File, len(i.Tensors), size(i.Bytes))
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, x := range i.Tensors {
		fmt.Fprintf(t, "  %s\t%v\t%v\t%s\t%s\n", errs.Words(x.Name), x.Element, x.Shape, size(x.Size()), x.Digest)
	}
	_ = t.Flush() // the output keeps its first error
	if i.Measured == nil {
		return
	}
	if r := i.Measured; r.Load == 0 {
		fmt.Fprintf(out, "device %d has too little free memory; reading alone %.1f GB/s\n", r.Device, r.Read/1e9)
	} else {
		fmt.Fprintf(out, "loaded to device %d at %.1f GB/s, again at %.1f GB/s; copying alone %.1f GB/s, reading alone %.1f GB/s\n",
			r.Device, r.Load/1e9, r.Again/1e9, r.Copy/1e9, r.Read/1e9)
	}
}
