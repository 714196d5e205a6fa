package inspect

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Write writes the snapshot as JSON.
func (s Snapshot) Write(w io.Writer) error {
	if err := json.NewEncoder(w).Encode(s); err != nil {
		return fmt.Errorf("inspect: write a snapshot: %w", err)
	}
	return nil
}

// Read reads a snapshot that Write wrote. It returns an error for a snapshot of another
// Version, for one that is cut short, for one with impossible ranges (of a negative size,
// outside of the range they are part of, or out of order) or devices, and for one of more
// than 1 GiB or more elements than a program has. It reads no further than these limits.
func Read(r io.Reader) (Snapshot, error) { return read(r, whole) }

// ReadSummary is Read for a snapshot that [Summarize] took, of at most 16 MiB.
func ReadSummary(r io.Reader) (Snapshot, error) { return read(r, summary) }

func read(r io.Reader, most limits) (Snapshot, error) {
	var s Snapshot
	err := json.NewDecoder(&bounded{r: r, limits: most}).Decode(&s)
	complete := err == nil || errors.As(err, new(*json.UnmarshalTypeError)) // another version has fields of other types
	switch {
	case complete && (s.Format != Format || s.Version != Version):
		return Snapshot{}, fmt.Errorf("inspect: format %q, version %d: this program reads %q, version %d; use the program that wrote it",
			s.Format, s.Version, Format, Version)
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return Snapshot{}, fmt.Errorf("inspect: read a snapshot: it is cut short: %w", err)
	case err != nil:
		return Snapshot{}, fmt.Errorf("inspect: read a snapshot: %w", err)
	}
	if err := s.check(); err != nil {
		return Snapshot{}, fmt.Errorf("inspect: read a snapshot: %w; no snapshot was written like that", err)
	}
	return s, nil
}

// maxSpace is more address space than any device has.
const maxSpace = 1 << 57

// check returns an error for impossible ranges and devices.
func (s Snapshot) check() error {
	end := Address(0)
	for _, r := range s.Reservations {
		if r.Ptr < end || r.Bytes < 0 || r.Bytes > maxSpace || uint64(r.Ptr) > maxSpace {
			return fmt.Errorf("the reservation of %d bytes at %v overlaps the one before it or is too large", r.Bytes, r.Ptr)
		}
		end = r.Ptr + Address(r.Bytes)
		in := run{whole: r.Bytes}
		for _, m := range r.Mappings {
			if !in.next(m.Offset, m.Bytes) {
				return fmt.Errorf("the mapping of %d bytes at offset %d does not fit into the reservation at %v", m.Bytes, m.Offset, r.Ptr)
			}
		}
	}
	for _, b := range s.Buffers {
		if min(b.Used, b.Committed, b.Reserved) < 0 || max(b.Used, b.Committed, b.Reserved) > maxSpace { // they differ in time, so no more is certain
			return fmt.Errorf("the buffer at %v uses %d of %d bytes, of %d reserved", b.Ptr, b.Used, b.Committed, b.Reserved)
		}
		if b.Device < 0 || b.Device >= maxDevices {
			return fmt.Errorf("the buffer at %v is on device %d, of at most %d", b.Ptr, b.Device, maxDevices)
		}
	}
	for _, p := range s.Pools {
		if p.Device < 0 || p.Device >= maxDevices {
			return fmt.Errorf("pool %d is on device %d, of at most %d", p.Serial, p.Device, maxDevices)
		}
		for _, g := range p.Segments {
			if g.Bytes < 0 || g.Bytes > maxSpace || uint64(g.Ptr) > maxSpace {
				return fmt.Errorf("the segment of %d bytes at %v is too large", g.Bytes, g.Ptr)
			}
			in := run{whole: g.Bytes}
			for _, b := range g.Blocks {
				if !in.next(b.Offset, b.Bytes) {
					return fmt.Errorf("the block of %d bytes at offset %d does not fit into the segment at %v", b.Bytes, b.Offset, g.Ptr)
				}
			}
		}
	}
	return nil
}

// run checks parts of a range, by offset.
type run struct{ whole, end int }

func (r *run) next(offset, bytes int) bool {
	if offset < r.end || bytes < 0 || bytes > r.whole || offset > r.whole-bytes {
		return false
	}
	r.end = offset + bytes
	return true
}
