package inspect

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Use is memory with one purpose: the blocks and buffers of a tag, or those that one function of the program created.
type Use struct {
	// Name is the tag, or else the buffer's name, or else the function, or else the kind of
	// memory.
	Name string `json:"name"`
	// Bytes is the sum of the requests, and Count the number of blocks and buffers.
	Bytes int `json:"bytes"`
	Count int `json:"count"`
}

// Uses returns the uses of the memory of buffers, sparse ranges and pools, the largest first.
// Memory that several buffers or ranges share counts in each.
func (s Snapshot) Uses() []Use {
	sums := map[string]*Use{}
	add := func(name string, bytes int) {
		u := sums[name]
		if u == nil {
			u = &Use{Name: name}
			sums[name] = u
		}
		u.Bytes += bytes
		u.Count++
	}
	for _, b := range s.Buffers {
		add(cmp.Or(b.Tag, b.Name, s.creator(b.Stack, "buffers")), b.Committed)
	}
	for _, x := range s.Sparse {
		add(cmp.Or(x.Tag, x.Name, s.creator(x.Stack, "sparse ranges")), x.Mapped*x.Page)
	}
	for _, p := range s.Pools {
		for _, g := range p.Segments {
			for _, b := range g.Blocks {
				if !b.Waiting {
					add(cmp.Or(b.Tag, s.creator(b.Stack, "blocks without a tag")), b.Requested)
				}
			}
		}
	}
	return sorted(sums)
}

// Compare returns how the uses of memory differ between two snapshots, the largest
// difference first. Bytes and Count are negative if the second snapshot has less.
func Compare(before, after Snapshot) []Use {
	sums := map[string]*Use{}
	for _, u := range after.Uses() {
		sums[u.Name] = &u
	}
	for _, u := range before.Uses() {
		d := sums[u.Name]
		if d == nil {
			d = &Use{Name: u.Name}
			sums[u.Name] = d
		}
		d.Bytes -= u.Bytes
		if d.Count -= u.Count; d.Bytes == 0 && d.Count == 0 {
			delete(sums, u.Name)
		}
	}
	return sorted(sums)
}

func sorted(sums map[string]*Use) []Use {
	all := make([]Use, 0, len(sums))
	for _, u := range sums {
		all = append(all, *u)
	}
	slices.SortFunc(all, func(a, b Use) int {
		return cmp.Or(cmp.Compare(max(b.Bytes, -b.Bytes), max(a.Bytes, -a.Bytes)), strings.Compare(a.Name, b.Name))
	})
	return all
}

// creator returns the innermost function of a stack outside of the library.
func (s Snapshot) creator(stack int, unknown string) string {
	if stack < 1 || stack > len(s.Stacks) {
		return unknown
	}
	for _, f := range s.Stacks[stack-1] {
		if !strings.HasPrefix(f, "github.com/cuvmm/cuvmm/") || strings.Contains(f, "_test.go:") || strings.Contains(f, "/samples/") {
			return shortened(f)
		}
	}
	return unknown
}

// shortened returns "b.F (d.go:7)" for "a/b.F (/c/d.go:7)".
func shortened(frame string) string {
	function, place, _ := strings.Cut(frame, " (")
	return fmt.Sprintf("%s (%s", function[strings.LastIndex(function, "/")+1:], place[strings.LastIndex(place, "/")+1:])
}

// Title is the pool's number, its name if it has one, and its device: pool 1 "scratch" on
// device 0.
func (p Pool) Title() string {
	return fmt.Sprintf("pool %d%s on device %d", p.Serial, quoted(p.Name), p.Device)
}

// Title is "pages" with the source's name: pages "kv".
func (s Source) Title() string { return "pages" + quoted(s.Name) }

// quoted returns a space and the name in quotes, or "" for no name.
func quoted(name string) string {
	if name == "" {
		return ""
	}
	return fmt.Sprintf(" %q", name)
}

// Holder describes the owner of a reservation, such as "buffer", "sparse range" or "pool 1 on device 0",
// with its name if it has one. It is "" for a reservation that the program maps itself.
func (s Snapshot) Holder(r Reservation) string {
	within := func(p Address) bool { return p >= r.Ptr && p < r.Ptr+Address(r.Bytes) }
	for _, b := range s.Buffers {
		if b.Ptr != r.Ptr {
			continue
		}
		holder := "buffer" + quoted(b.Name)
		for _, p := range s.Publications {
			if p.Ptr == b.Ptr {
				return fmt.Sprintf("%s, published as %q", holder, p.Name)
			}
		}
		for _, f := range s.Followers {
			if f.Ptr == b.Ptr {
				return fmt.Sprintf("%s, follows %q of process %d", holder, f.Name, f.PID)
			}
		}
		if b.Imported {
			return holder + ", imported"
		}
		return holder
	}
	for _, x := range s.Sparse {
		if x.Ptr == r.Ptr {
			return "sparse range" + quoted(x.Name)
		}
	}
	for _, p := range s.Pools {
		for _, g := range p.Segments {
			if within(g.Ptr) {
				return p.Title()
			}
		}
	}
	return ""
}
