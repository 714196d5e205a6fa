package inspect

import (
	"encoding/json"
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

// Read reads a snapshot that Write wrote. Snapshots of another Version are refused.
func Read(r io.Reader) (Snapshot, error) {
	var s Snapshot
	if err := json.NewDecoder(r).Decode(&s); err != nil {
		return Snapshot{}, fmt.Errorf("inspect: read a snapshot: %w", err)
	}
	if s.Format != Format || s.Version != Version {
		return Snapshot{}, fmt.Errorf("inspect: format %q, version %d: this program reads %q, version %d; use the program that wrote it",
			s.Format, s.Version, Format, Version)
	}
	return s, nil
}
