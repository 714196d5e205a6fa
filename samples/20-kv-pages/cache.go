package main

import (
	"errors"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

// sequence is tokens that lie one behind the other in the slot where the sequence runs.
type sequence struct{ id, slot, tokens, end int }

type cache struct {
	*app.Env
	*model
	pages   *vmm.Pages
	limit   int                       // pages
	slots   [prompts + 28]*vmm.Sparse // ranges; the first ones have the prompts
	running [prompts + 28]*sequence   // in the slots
	waiting []*sequence
	current *sequence // is not evicted
	served  int       // tokens
	evicted int
}

// step begins the sequences that there is room for, and gives each that runs its next tokens.
func (c *cache) step() error {
	for i := prompts; i < len(c.slots) && len(c.waiting) > 0; i++ {
		q := c.waiting[0]
		used, needs := c.pages.Stats().Used, (q.tokens+step)/perPage+2-promptPages
		if c.running[i] != nil || used > prompts*promptPages && used+needs > c.limit {
			continue
		}
		q.slot, c.running[i], c.waiting = i, q, c.waiting[1:]
		if err := c.begin(q); err != nil {
			return err
		}
	}
	for i := range c.running {
		q := c.running[i]
		if q == nil {
			continue // or it was evicted in this step
		}
		next := min(q.tokens+step, q.end)
		c.served += next - q.tokens
		err := c.fill(q, next)
		if err == nil {
			err = c.attend(c.slots[i].Ptr(), q.tokens)
		}
		if err == nil && q.tokens == q.end {
			err = errors.Join(c.check(q.text(0, q.end)), c.leave(q))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// begin forks a prompt: its whole pages are shared, and what lies behind them is copied.
func (c *cache) begin(q *sequence) error {
	prompt, own, whole := c.slots[q.id%prompts], c.slots[q.slot], promptPages-1
	if err := own.Share(c.Context, prompt, 0, vmm.Span{N: whole}); err != nil {
		return err
	}
	had := q.tokens // before it was evicted
	q.tokens = promptTokens
	if err := c.fill(q, had); err != nil {
		return err
	}
	tail := cuda.Ptr(whole * c.pages.Page())
	return c.stream.Copy(own.Ptr()+tail, prompt.Ptr()+tail, c.bytes(promptTokens%perPage))
}

// fill maps the pages of a sequence's next tokens, and writes these.
func (c *cache) fill(q *sequence, to int) error {
	first, end := q.tokens/perPage, (to+perPage-1)/perPage
	c.current = q
	if err := c.slots[q.slot].Map(c.Context, c.stream, vmm.Span{First: first, N: end - first}); err != nil {
		return err
	}
	err := c.write(c.slots[q.slot].Ptr(), q.tokens, q.text(q.tokens, to))
	q.tokens = to
	return err
}

// evict is called if the budget lacks memory: sequences leave that free most pages.
func (c *cache) evict(need int) (freed int) {
	for freed < need {
		var victim *sequence
		most := 0
		for i, q := range c.running {
			if q == nil || q == c.current {
				continue
			}
			if s := c.slots[i].Stats(); s.Mapped-s.Shared > most {
				victim, most = q, s.Mapped-s.Shared
			}
		}
		if victim == nil || c.leave(victim) != nil {
			break
		}
		c.waiting = append(c.waiting, victim)
		c.evicted++
		freed += most * c.pages.Page()
	}
	return freed
}

// leave frees the pages of a sequence: at once for later work of the stream.
func (c *cache) leave(q *sequence) error {
	c.running[q.slot] = nil
	return c.slots[q.slot].UnmapAfter([]*cuda.Stream{c.stream}, vmm.Span{N: len(c.slots[q.slot].States())})
}

// text returns some of a sequence's tokens, which begin with those of its prompt.
func (q *sequence) text(from, to int) (tokens []uint32) {
	for at := from; at < to; at++ {
		id := q.id
		if at < promptTokens {
			id %= prompts
		}
		tokens = append(tokens, uint32(id<<20+at))
	}
	return tokens
}
