package pool

import "github.com/cuvmm/cuvmm/vmm/pool/trace"

// watch is what is told of every block of a shard, where an option asks for
// it: without one there is none, and a warm request tests one pointer.
type watch struct {
	stats   *statistics
	tags    []TagStats // of the shard, by tag
	totals  totals
	sites   map[*header]site
	history *ring
}

func (p *Pool) newWatch() *watch {
	if !p.o.Statistics && !p.o.Track && p.history.Load() == nil {
		return nil
	}
	w := &watch{stats: p.stats, history: p.history.Load()}
	if p.o.Track {
		w.sites = map[*header]site{}
	}
	return w
}

// allocated is told of a block that is live now, with its shard's lock held.
func (w *watch) allocated(h *header) {
	if w.stats != nil {
		w.stats.allocated(w, h)
	}
	if w.sites != nil {
		w.sites[h] = caller()
	}
	if w.history != nil {
		w.history.add(trace.Alloc, h, nil)
	}
}

// freed is told of a block that is not live any more.
func (w *watch) freed(h *header, used []point) {
	if w.stats != nil {
		w.stats.freed(w, h)
	}
	if w.sites != nil {
		delete(w.sites, h)
	}
	if w.history != nil {
		w.history.add(trace.Free, h, used)
	}
}
