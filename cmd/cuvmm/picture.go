package main

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// picture writes snapshots to a terminal.
type picture struct {
	out   io.Writer // for text
	cells io.Writer // for cells, which may have colors
	width int       // of a row, in cells
	rows  int       // of all reservations, roughly
	color bool
}

// cell is a character of a row: the bytes of it that are mapped, in use, and waiting for
// the GPU.
type cell struct{ mapped, used, waiting float64 }

// glyph shows how much of a cell is mapped and in use.
func (c cell) glyph() rune {
	const steps = "░▒▓█"
	switch {
	case c.mapped == 0:
		return '·'
	case c.used+c.waiting == 0:
		return '░'
	}
	share := min(1, (c.used+c.waiting)/c.mapped)
	return []rune(steps)[1+int(math.Round(share*2))]
}

// paint returns the terminal's number of the cell's color.
func (c cell) paint() string {
	switch {
	case c.mapped == 0:
		return "90" // gray
	case c.waiting > c.used:
		return "33" // yellow
	case c.used == 0:
		return "37"
	}
	return "34" // blue
}

const (
	legend        = "█ in use  ▓▒ partly  ░ mapped, not in use  · not mapped"
	managedLegend = "managed memory: █ on a device  ▓▒ partly  ░ on the host  · untouched"
)

// piece is a run of addresses and its place in the picture, where a long hole is
// shortened.
type piece struct {
	from, bytes  int
	at, shown    float64
	hole, cutOff bool
}

// pieces splits a reservation into mapped runs and holes.
func pieces(r inspect.Reservation, longest float64) (all []piece, shown float64) {
	add := func(from, to int, hole bool) {
		if from == to {
			return
		}
		if n := len(all); n > 0 && !hole && !all[n-1].hole {
			all[n-1].bytes += to - from
			all[n-1].shown += float64(to - from)
			shown += float64(to - from)
			return
		}
		p := piece{from: from, bytes: to - from, at: shown, shown: float64(to - from), hole: hole}
		if hole && p.shown > longest {
			p.shown, p.cutOff = longest, true
		}
		all = append(all, p)
		shown += p.shown
	}
	end := 0
	for _, m := range r.Mappings {
		add(end, m.Offset, true)
		add(m.Offset, m.Offset+m.Bytes, false)
		end = m.Offset + m.Bytes
	}
	add(end, r.Bytes, true)
	return all, shown
}

// stretch is a run of a reservation that is in use, or waits for the GPU.
type stretch struct {
	from, bytes int
	waiting     bool
}

// stretches returns the runs in use by the address of their reservation.
func stretches(s inspect.Snapshot) map[inspect.Address][]stretch {
	in := map[inspect.Address][]stretch{}
	of := func(p inspect.Address) (inspect.Address, bool) {
		at, found := slices.BinarySearchFunc(s.Reservations, p, func(r inspect.Reservation, p inspect.Address) int {
			switch {
			case r.Ptr+inspect.Address(r.Bytes) <= p:
				return -1
			case r.Ptr > p:
				return 1
			}
			return 0
		})
		if !found {
			return 0, false
		}
		return s.Reservations[at].Ptr, true
	}
	for _, b := range s.Buffers {
		in[b.Ptr] = append(in[b.Ptr], stretch{bytes: b.Used})
	}
	for _, x := range s.Sparse {
		in[x.Ptr] = []stretch{}
		for _, sp := range x.Spans {
			in[x.Ptr] = append(in[x.Ptr], stretch{from: sp.First * x.Page, bytes: sp.N * x.Page})
		}
	}
	for _, p := range s.Pools {
		for _, g := range p.Segments {
			if r, known := of(g.Ptr); known {
				in[r] = slices.Grow(in[r], 1) // a pool's range is known as one even without blocks
				for _, b := range g.Blocks {
					in[r] = append(in[r], stretch{int(g.Ptr-r) + b.Offset, b.Bytes, b.Waiting})
				}
			}
		}
	}
	for _, r := range s.Reservations {
		if in[r.Ptr] == nil { // memory that the program maps itself counts as in use
			for _, m := range r.Mappings {
				in[r.Ptr] = append(in[r.Ptr], stretch{m.Offset, m.Bytes, m.Closing})
			}
		}
	}
	return in
}

// located returns managed memory as a reservation of the pages that were touched, of which
// those on a device are in use. It is empty if the driver does not know where they are.
func located(m inspect.Managed) (r inspect.Reservation, in []stretch) {
	if !m.Located {
		return r, nil
	}
	r.Bytes = m.Bytes
	for _, x := range m.Resident {
		r.Mappings = append(r.Mappings, inspect.Mapping{Offset: x.Offset, Bytes: x.Bytes})
		if strings.HasPrefix(x.Location, "device") {
			in = append(in, stretch{from: x.Offset, bytes: x.Bytes})
		}
	}
	return r, in
}

// residency says where managed memory is.
func residency(m inspect.Managed) string {
	text := "managed memory: " + size(m.Bytes)
	switch {
	case !m.Located && m.Prefetched != "":
		return text + ", last prefetched to " + m.Prefetched
	case !m.Located:
		return text
	}
	sums, touched := map[string]int{}, 0
	for _, r := range m.Resident {
		sums[r.Location] += r.Bytes
		touched += r.Bytes
	}
	for _, at := range slices.Sorted(maps.Keys(sums)) {
		text += ", " + size(sums[at]) + " on " + at
	}
	if touched < m.Bytes {
		text += ", " + size(m.Bytes-touched) + " untouched"
	}
	return text
}

// write draws all reservations and managed memory at one scale.
func (p picture) write(s inspect.Snapshot) {
	all := slices.Clone(s.Reservations)
	for _, m := range s.Managed {
		r, _ := located(m)
		all = append(all, r)
	}
	perCell := p.scale(all)
	in := stretches(s)
	fmt.Fprintf(p.out, "%s (%d), %s\n", s.Process.Name, s.Process.PID, s.Driver)
	for _, d := range s.Devices {
		free := ""
		if d.Free != nil {
			free = ", " + size(*d.Free) + " free"
		}
		fmt.Fprintf(p.out, "device %d: %s, %s%s\n", d.Ordinal, d.Name, size(d.Memory), free)
	}
	fmt.Fprintf(p.out, "%s, %s of memory, %s\n", errs.Count(s.Totals.Reservations, "reservation"), size(s.Totals.AllocatedBytes), errs.Count(s.Totals.Mappings, "mapping"))
	fmt.Fprintf(p.out, "%s; a cell is %s\n\n", legend, size(int(perCell)))
	for _, r := range s.Reservations {
		mapped := 0
		for _, m := range r.Mappings {
			mapped += m.Bytes
		}
		holder := s.Holder(r)
		if holder == "" {
			holder = "reservation"
		}
		fmt.Fprintf(p.out, "%s  %s: %s mapped of %s%s\n", r.Ptr, holder, size(mapped), size(r.Bytes), sharing(s, r))
		p.draw(cells(r, in[r.Ptr], perCell, p.width))
	}
	if slices.ContainsFunc(s.Managed, func(m inspect.Managed) bool { return m.Located }) {
		fmt.Fprintln(p.out, managedLegend)
	}
	for _, m := range s.Managed {
		fmt.Fprintf(p.out, "%s  %s\n", m.Ptr, residency(m))
		r, on := located(m)
		p.draw(cells(r, on, perCell, p.width))
	}
	p.tables(s)
}

// scale returns the bytes of a cell with which the picture has about p.rows rows.
func (p picture) scale(all []inspect.Reservation) float64 {
	for perCell := 4096.0; ; perCell *= 2 {
		rows := 0.0
		for _, r := range all {
			_, shown := pieces(r, perCell*float64(p.width)/4)
			rows += math.Ceil(shown / perCell / float64(p.width))
		}
		if rows <= float64(max(p.rows, len(all))) || perCell > 1<<50 {
			return perCell
		}
	}
}

// cells returns the cells of a reservation.
func cells(r inspect.Reservation, in []stretch, perCell float64, width int) []cell {
	all, shown := pieces(r, perCell*float64(width)/4)
	out := make([]cell, int(math.Ceil(shown/perCell)))
	spread := func(from, bytes int, to func(c *cell, n float64)) {
		at, _ := slices.BinarySearchFunc(all, from, func(p piece, from int) int {
			if p.from+p.bytes <= from {
				return -1
			}
			return 1
		})
		if at == len(all) || all[at].hole {
			return // unmapped while the snapshot was taken
		}
		d := all[at].at + float64(from-all[at].from)
		for left := float64(bytes); left > 0; {
			i := int(d / perCell)
			if i >= len(out) {
				return
			}
			n := min(left, float64(i+1)*perCell-d)
			if n <= 0 {
				return
			}
			to(&out[i], n)
			d, left = d+n, left-n
		}
	}
	for _, p := range all {
		if !p.hole {
			spread(p.from, p.bytes, func(c *cell, n float64) { c.mapped += n })
		}
	}
	for _, s := range in {
		spread(s.from, s.bytes, func(c *cell, n float64) {
			if s.waiting {
				c.waiting += n
			} else {
				c.used += n
			}
		})
	}
	return out
}

func (p picture) draw(all []cell) {
	for row := range slices.Chunk(all, p.width) {
		var b strings.Builder
		b.WriteString("  ")
		last := ""
		for _, c := range row {
			if paint := c.paint(); p.color && paint != last {
				b.WriteString("\x1b[" + paint + "m")
				last = paint
			}
			b.WriteRune(c.glyph())
		}
		if p.color {
			b.WriteString("\x1b[0m")
		}
		fmt.Fprintln(p.cells, b.String())
	}
}

// sharing describes how a reservation's memory is shared, and what of it is suspended.
func sharing(s inspect.Snapshot, r inspect.Reservation) string {
	shared := map[uint64]inspect.Memory{}
	for _, m := range s.Memory {
		if m.Mappings > 1 || m.Exported || m.Imported {
			shared[m.ID] = m
		}
	}
	aliases, exported, imported, asleep := 0, 0, 0, 0
	for _, m := range r.Mappings {
		about := shared[m.Memory]
		if about.Mappings > 1 {
			aliases += m.Bytes
		}
		if about.Exported {
			exported += m.Bytes
		}
		if about.Imported {
			imported += m.Bytes
		}
		if m.Suspended {
			asleep += m.Bytes
		}
	}
	var b strings.Builder
	for _, part := range []struct {
		bytes int
		what  string
	}{{aliases, "aliased"}, {exported, "exported"}, {imported, "imported"}, {asleep, "suspended"}} {
		if part.bytes > 0 {
			fmt.Fprintf(&b, ", %s %s", size(part.bytes), part.what)
		}
	}
	return b.String()
}

// tables writes what holds the memory, and what is shared.
func (p picture) tables(s inspect.Snapshot) {
	const most = 12
	fmt.Fprintln(p.out)
	for _, q := range s.Pools {
		fmt.Fprintf(p.out, "%s: %s in %d blocks, %s reserved, %s at most\n", q.Title(), size(q.Requested), q.Blocks, size(q.Reserved), size(q.Peak))
	}
	for _, q := range s.Sources {
		fmt.Fprintf(p.out, "%s: %d of %s of %s in use\n", q.Title(), q.Used, errs.Count(q.Pages, "page"), size(q.Page))
	}
	for _, q := range s.Publications {
		fmt.Fprintf(p.out, "publishes %q: %s to %d followers, %s pinned by them%s\n", q.Name, size(q.Bytes), len(q.Followers), size(q.Pinned), sleeps(q.Suspended))
		for _, f := range q.Followers {
			fmt.Fprintf(p.out, "  process %d has %s, %s pinned%s\n", f.PID, size(f.Bytes), size(f.Pinned), reason("refused the last generation", f.Refused))
		}
	}
	for _, f := range s.Followers {
		fmt.Fprintf(p.out, "follows %q of process %d: %s%s%s\n", f.Name, f.PID, size(f.Bytes), sleeps(f.Suspended), reason("stuck", f.Stuck))
	}
	for _, l := range s.Leases {
		fmt.Fprintf(p.out, "leases %s until %s\n", size(l.Bytes), l.Until.Format("15:04:05"))
	}
	for i, l := range s.Leftovers {
		if i == most {
			fmt.Fprintf(p.out, "and %d more of %d that could not be given back (-json shows all)\n", len(s.Leftovers)-most, len(s.Leftovers))
			break
		}
		fmt.Fprintf(p.out, "could not be given back, and is tried again: %s of %s: %s\n", l.What, size(l.Bytes), l.Error)
	}
	for i, u := range s.Uses() {
		if i == 0 {
			fmt.Fprintln(p.out, "most memory:")
		}
		if i == most {
			fmt.Fprintf(p.out, "%10s and %d more uses (-html shows all)\n", "", len(s.Uses())-most)
			break
		}
		fmt.Fprintf(p.out, "%10s %6d  %s\n", size(u.Bytes), u.Count, u.Name)
	}
}

// sleeps says that the memory of a publication is suspended.
func sleeps(yes bool) string {
	if yes {
		return "; sleeps"
	}
	return ""
}

// reason returns "; what: why", or "" if why is empty.
func reason(what, why string) string {
	if why == "" {
		return ""
	}
	return "; " + what + ": " + why
}

// size writes bytes in the largest unit that leaves a number of at least 1, as the page does.
func size(bytes int) string {
	n, unit := float64(bytes), 0
	for math.Abs(n) >= 1024 && unit < 5 {
		n, unit = n/1024, unit+1
	}
	name := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}[unit]
	if n == math.Trunc(n) || math.Abs(n) >= 100 {
		return fmt.Sprintf("%.0f %s", math.Round(n), name)
	}
	return fmt.Sprintf("%.1f %s", math.Round(n*10)/10, name)
}
