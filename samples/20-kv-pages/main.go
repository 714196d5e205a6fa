// Command 20-kv-pages serves 64 sequences from a cache of pages. Each has contiguous addresses
// as far as it may grow, and pages where it has tokens. Sequences that begin with the same prompt
// share its pages. If the budget is used up, the sequence that frees most pages is evicted, and
// begins again later.
//
//	go run ./samples/20-kv-pages [-driver auto|real|sim] [-tokens TOKENS] [-pages PAGES]
package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

var sample = app.Sample{
	Name:    "20-kv-pages",
	Shows:   "sequences with contiguous addresses in a cache of pages: shared, recycled, evicted",
	Machine: sim.Options{Devices: []sim.DeviceOptions{{Granularity: 64 << 10}}},
	Next:    "21-broker: weights that outlive the engine that loaded them",
	Run:     func(e *app.Env) error { return (&cache{Env: e}).run() },
}

func main() { app.Main(sample) }

const (
	sequences    = 64
	prompts      = 4
	promptTokens = 600 // two pages and a part
	perPage      = 256 // tokens: the model has as many layers as fill a page with them
	promptPages  = promptTokens/perPage + 1
	step         = 16 // tokens that a sequence gets at a time
)

// run serves the sequences.
func (c *cache) run() (err error) {
	tokens := c.Flags.Int("tokens", 40_000, "how many `tokens` the sequences get in all")
	c.Flags.IntVar(&c.limit, "pages", 64, "the budget in `pages`")
	if err := c.Open(); err != nil {
		return err
	}
	if *tokens < 0 || *tokens > 1<<16 || c.limit < 1 {
		return app.Usagef("-tokens %d -pages %d: use 0 to %d tokens, and 1 page or more", *tokens, c.limit, 1<<16)
	}
	budget := cuda.NewBudget(0, cuda.BudgetOptions{Name: "cache"})
	if c.pages, err = vmm.NewPages(c.Device, vmm.PagesOptions{Budget: budget}); err != nil {
		return err
	}
	defer app.Close(c.pages, &err)
	stop, err := budget.OnPressure(0, c.evict)
	if err = errors.Join(err, budget.SetLimit(c.limit*c.pages.Page())); err != nil {
		return err
	}
	defer stop()
	if c.model, err = newModel(c.Device, c.pages.Page()/perPage/entryBytes); err != nil {
		return err
	}
	defer app.Close(c.model, &err)
	for i := range c.slots { // addresses cost nothing, and are used again
		c.slots[i], err = vmm.NewSparse(c.Device, vmm.SparseOptions{Pages: c.pages, Reserve: 512 * c.pages.Page()})
		if err != nil {
			return err
		}
		defer app.Close(c.slots[i], &err)
		if i < prompts {
			if err := c.fill(&sequence{id: i, slot: i}, promptTokens); err != nil {
				return err
			}
		}
	}
	for i := range sequences {
		c.waiting = append(c.waiting, &sequence{id: prompts + i, tokens: promptTokens, end: promptTokens})
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range *tokens / step { // some sequences are long
		c.waiting[random.IntN(1+random.IntN(sequences))].end += step
	}
	for drawn := false; len(c.waiting) > 0 || c.running != [len(c.running)]*sequence{}; {
		if err := c.step(); err != nil {
			return err
		}
		if !drawn && c.served >= *tokens/2 {
			drawn = true
			c.draw()
		}
	}
	st := c.pages.Stats()
	c.Line("pages", "%d were made, and used again %d times", st.Made, st.Recycled+st.Reused)
	c.Line("verified", "%d sequences, and %d times that one was evicted", sequences, c.evicted)
	return nil
}

// draw prints the pages of each slot: shared, of its own, and free ones that lie there yet.
func (c *cache) draw() {
	marks := [...]string{vmm.PageHole: " ", vmm.PageFreed: ".", vmm.PageMapped: "█", vmm.PageShared: "░"}
	for i, s := range c.slots {
		row := ""
		for _, state := range s.States() {
			row += marks[state]
		}
		c.Line(fmt.Sprintf("slot %d", i), "%s", strings.TrimRight(row, " "))
	}
}
