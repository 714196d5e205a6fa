package suspend

import (
	"cmp"
	"slices"
	"sort"
	"time"

	"github.com/cuvmm/cuvmm/internal/bulk"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// chunk is memory of the named members, once however many of them map it. Its Suspension is
// an owner of it until it comes back, or until no member needs it.
type chunk struct {
	h    *phys.Handle
	size uint64
	// first is the member that was named first of those that map it, and maps are the
	// mappings of all.
	first *place
	maps  []*vrange.Mapping
	// stays says why the memory is not taken. It stays mapped, and nothing is kept of it.
	stays string
	parts []part // its bytes that count
	kept  *kept  // which has them, in host memory; nil if they are not kept
	off   uint64 // where in it
	// at is the mapping through which the bytes are copied, or filled.
	at *vrange.Mapping
	// late names the follower in another process that still has the memory. It goes all the same.
	late string
	// given: the memory is unmapped, and given back as far as the driver takes it.
	given bool
	// owed: the driver refused to unmap or to release it, which the System's leftovers try
	// again.
	owed error
}

// part is bytes of a chunk, from an offset on.
type part struct{ off, size uint64 }

// bytes returns how many bytes of the chunk count.
func (c *chunk) bytes() (n uint64) {
	for _, p := range c.parts {
		n += p.size
	}
	return n
}

// partsOf returns the parts of a mapping that are among what is kept of its member.
func partsOf(m *vrange.Mapping, kept []bulk.Segment) (parts []part) {
	if kept == nil {
		return []part{{0, m.Memory.Size}}
	}
	from, to := m.Ptr(), m.Ptr()+driver.Ptr(m.Memory.Size)
	i := sort.Search(len(kept), func(i int) bool { return kept[i].Ptr+driver.Ptr(kept[i].Bytes) > from })
	var within []bulk.Segment
	for ; i < len(kept) && kept[i].Ptr < to; i++ {
		at, end := max(kept[i].Ptr, from), min(kept[i].Ptr+driver.Ptr(kept[i].Bytes), to)
		within = append(within, bulk.Segment{Ptr: at, Bytes: uint64(end - at)})
	}
	for _, s := range bulk.Join(within, bulk.WorthJoining) {
		parts = append(parts, part{uint64(s.Ptr - from), s.Bytes})
	}
	return parts
}

// plan is what becomes of the named members' memory.
type plan struct {
	chunks []*chunk // each once, in the order of the members and their addresses
	byName map[*phys.Handle]*chunk
	ranges []stretch // all mappings
	// published are counts that publications have of the memory, and give up before it goes.
	published map[*phys.Handle]int64
}

// stretch is mappings of one range, in order, that driver calls can take together.
type stretch struct {
	maps  []*vrange.Mapping
	reach driver.Location // the device that writes them as they come back, if it may not
}

// ranges returns the mappings of chunks.
func ranges(chunks []*chunk, reach func(*chunk, *vrange.Mapping) driver.Location) (all []stretch) {
	type key struct {
		in    *vrange.Range
		reach driver.Location
	}
	at := map[key]int{}
	for _, c := range chunks {
		for _, m := range c.maps {
			k := key{in: m.Range}
			if reach != nil {
				k.reach = reach(c, m)
			}
			i, known := at[k]
			if !known {
				i = len(all)
				at[k] = i
				all = append(all, stretch{reach: k.reach})
			}
			all[i].maps = append(all[i].maps, m)
		}
	}
	for _, r := range all {
		slices.SortFunc(r.maps, func(a, b *vrange.Mapping) int { return cmp.Compare(a.Off, b.Off) })
	}
	return all
}

// newPlan collects the chunks of members that are locked, or, for a preview, may change
// meanwhile.
func newPlan(places []*place) *plan {
	p := &plan{byName: map[*phys.Handle]*chunk{}}
	for _, at := range places {
		kept := at.m.Kept()
		for _, m := range at.m.Mappings() {
			c := p.byName[m.Memory]
			if c == nil {
				c = &chunk{h: m.Memory, size: m.Memory.Size, first: at, parts: partsOf(m, kept)}
				p.byName[m.Memory] = c
				p.chunks = append(p.chunks, c)
			}
			c.maps = append(c.maps, m)
		}
	}
	p.ranges = ranges(p.chunks, nil)
	return p
}

// going returns the chunks that are taken.
func (p *plan) going() (all []*chunk) {
	for _, c := range p.chunks {
		if c.stays == "" {
			all = append(all, c)
		}
	}
	return all
}

// Report says what became of the memory, or what would.
type Report struct {
	Members []Held
	// Host is how many bytes of host memory keep the contents.
	Host  uint64
	Guard Guard
}

// Held is the memory of one member, in bytes. Memory that several members map counts for the
// one that was named first.
type Held struct {
	Member Member
	// Asked are the member's, Given those that went back to the driver.
	Asked, Given uint64
	// Rest says what keeps the others, each reason once.
	Rest []Rest
}

// Rest is memory that was not given back.
type Rest struct {
	Bytes uint64
	Why   string
}

// byDevice returns chunks by where their memory lies: what devices do for them goes side by side.
func byDevice(chunks []*chunk) (all [][]*chunk) {
	at := map[driver.Location]int{}
	for _, c := range chunks {
		i, known := at[c.h.Asked.Location]
		if !known {
			i = len(all)
			at[c.h.Asked.Location] = i
			all = append(all, nil)
		}
		all[i] = append(all[i], c)
	}
	return all
}

// reason is why a chunk was not given back. kind is the same for all chunks of one reason, and why
// may name the chunk.
type reason struct{ kind, why string }

// report counts chunks. given says whether one went back.
func report(places []*place, chunks []*chunk, given func(*chunk) (yes bool, not reason)) Report {
	r := Report{Members: make([]Held, len(places))}
	for i, p := range places {
		held := &r.Members[i]
		held.Member = p.m
		at := map[string]int{} // the entry of each kind
		for _, c := range chunks {
			if c.first != p {
				continue
			}
			held.Asked += c.size
			yes, not := given(c)
			if c.kept != nil {
				r.Host += c.bytes()
			}
			if yes {
				held.Given += c.size
				continue
			}
			n, known := at[not.kind]
			if !known {
				n = len(held.Rest)
				at[not.kind] = n
				held.Rest = append(held.Rest, Rest{Why: not.why})
			}
			held.Rest[n].Bytes += c.size
		}
	}
	return r
}

// tries and pause bound how long Take is tried while a driver call of another goroutine uses
// the memory, such as a query of its properties. A multicast binding uses it for longer.
const (
	tries = 20
	pause = 100 * time.Microsecond
)

// acquire takes the memory of chunks, so that no one maps or exports it, and decides which stay.
// Until then a chunk may have got another owner.
func (p *plan) acquire(op string) error {
	for _, c := range p.chunks {
		if r := c.h.Lost(); r != driver.Success {
			return errs.New(errs.Failure{Op: op, Call: driver.CallMemUnmap, Result: r, Asked: errs.Bytes(c.size)})
		}
		err := c.h.Take(op)
		for n := 1; err != nil && n < tries && !c.h.Imported; n++ {
			time.Sleep(pause)
			err = c.h.Take(op)
		}
		if err != nil {
			c.stays = inUse
			continue
		}
		c.h.Retain()
	}
	p.decide(1)
	for _, c := range p.chunks {
		if c.stays != "" && c.h.Taken() {
			c.untake()
		}
	}
	return nil
}

// untake returns the memory, unchanged, and ends the Suspension's hold of it.
func (c *chunk) untake() {
	c.h.Return()
	c.h.Release() // others hold it
}

// Preview reports what Out would do. Members may change meanwhile.
func Preview(op string, o Options, members []Member) (Report, error) {
	var places []*place
	for _, m := range members {
		if err := m.Acquire(op); err != nil {
			return Report{}, err
		}
		defer m.Release()
		if err := m.Begin(op, func() {}); err != nil { // it changes nothing
			return Report{}, err
		}
		if err := mayRecall(op, m); err != nil {
			return Report{}, err
		}
		places = append(places, &place{m: m})
	}
	p := newPlan(places)
	p.published = map[*phys.Handle]int64{}
	for _, at := range places {
		for _, shown := range publicationsOf(at.m) {
			for _, h := range shown.Memory() {
				p.published[h]++
			}
		}
	}
	p.decide(0)
	r := report(places, p.chunks, func(c *chunk) (bool, reason) {
		if c.stays == "" {
			return c.pinned()
		}
		return false, reason{c.stays, c.stays}
	})
	if o.Keep {
		for _, c := range p.going() {
			r.Host += c.bytes()
		}
	}
	return r, nil
}
