package suspend

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/vrange"
)

// Keeper is what has memory besides those who map it, and is in the System's list of live objects or
// shown by it: a lease, a multicast binding.
type Keeper interface {
	// Keeps says what it is, in a report, and what memory it has.
	Keeps() (what string, memory []*phys.Handle)
}

// Why chunks stay, if nothing is found that has them.
const (
	exported = "it was exported, so that another process may have it"
	mapped   = "it is mapped elsewhere"
	owned    = "an Allocation, or a descriptor that is being made, holds it"
	inUse    = "a multicast binding, or a driver call, uses it"
)

// decide says which chunks stay: a chunk goes if the named members hold all its counts, no
// other process can have it but followers, and nothing else of this one uses it. own is how many
// counts the caller has of each.
func (p *plan) decide(own int64) {
	staying := map[*phys.Handle]bool{}
	for _, c := range p.chunks {
		named := int64(len(c.maps))
		switch {
		case c.stays != "":
		case c.h.Exported() && !c.h.Followed():
			c.stays = exported
		case int64(c.h.Mappings.Load()) > named:
			c.stays = mapped
		case c.h.Owners() > named+own+p.published[c.h]:
			c.stays = owned
		}
		if c.stays != "" {
			staying[c.h] = true
		}
	}
	if len(staying) > 0 {
		p.name(staying)
	}
}

// mostNamed is how many a report names of those that have the same chunk.
const mostNamed = 3

// name says of chunks that stay who has them: other ranges, what keeps them, and other processes.
func (p *plan) name(staying map[*phys.Handle]bool) {
	ours := map[*vrange.Mapping]bool{}
	for _, c := range p.chunks {
		for _, m := range c.maps {
			ours[m] = true
		}
	}
	found := map[*phys.Handle][]string{}
	add := func(h *phys.Handle, who string) {
		if staying[h] && !slices.Contains(found[h], who) {
			found[h] = append(found[h], who)
		}
	}
	look := func(x any) {
		switch x := x.(type) {
		case *vrange.Mapping:
			if staying[x.Memory] && !ours[x] {
				add(x.Memory, fmt.Sprintf("memory in the range at %#x, which was not named, shares it", uint64(x.Range.Base)))
			}
		case Keeper:
			what, memory := x.Keeps()
			for _, h := range memory {
				add(h, what+" has it")
			}
		}
	}
	sys := p.chunks[0].h.System()
	sys.Live.Each(func(_ *life.Object, owner life.Owner) { look(owner) })
	for _, x := range sys.Shown() {
		look(x)
	}
	for h := range staying {
		if how := h.Sent(); how != "" {
			add(h, how+", so that another process may have it")
		}
		if who := found[h]; len(who) > 0 {
			if more := len(who) - mostNamed; more > 0 {
				who = append(who[:mostNamed], fmt.Sprintf("and %d more", more))
			}
			p.byName[h].stays = strings.Join(who, "; ")
		}
	}
}

// pinned is for report: a chunk that went is not free while a DMA-BUF of it is open.
func (c *chunk) pinned() (given bool, not reason) {
	if by := c.h.DMABufs(); by != "" {
		why := by + " pins it: close it, and what registered it, in a function of vmm.OnSuspend"
		return false, reason{why, why}
	}
	return true, reason{}
}
