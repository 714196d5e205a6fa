package pool

// How much more than the most that was ever requested at once the pool makes
// before it moves free chunks instead, as shares of that. Moving a chunk takes
// about the time of making one. So moving is cheap as long as little was moved,
// and a program whose holes never fit would pay for ever: the pool counts what
// it moved, and forgets some with each request. Up to freeMoves that changes
// nothing; each byte beyond buys perMoved bytes of new memory, up to
// Options.Slack. It counts no more than twice what buys all of that, or a long
// time at a limit, where chunks move whatever it costs, would be paid for as long.
const (
	leastSlack = 1.0 / 32
	mostSlack  = 1.0 / 4
	freeMoves  = 3.0 / 32
	perMoved   = 8
	// requestsPerMove are how many requests pay for the move of a chunk: some
	// tens of microseconds, against some tens of nanoseconds for each of them.
	requestsPerMove = 500
)

// allowance is how many bytes of new chunks may be made before those that are
// free should move instead. The caller holds slow.
func (p *Pool) allowance(w *want) uint64 {
	now, served := w.bytes, uint64(0)
	for _, sh := range p.all() {
		sh.mu.Lock()
		now += sh.requested
		served += sh.served
		sh.served = 0
		p.most = max(p.most, sh.peak)
		sh.mu.Unlock()
	}
	p.most = max(p.most, now)
	p.moved -= min(p.moved, served*(p.chunk/requestsPerMove))
	p.moved = min(p.moved, uint64(2*float64(p.most)*(freeMoves+max(p.slack-leastSlack, 0)/perMoved)))
	most := p.most + uint64(float64(p.most)*p.slackNow()) + 2*p.chunk
	if r := p.reserved.Load(); r < most {
		return most - r
	}
	return 0
}

func (p *Pool) slackNow() float64 {
	dear := float64(p.moved)/float64(max(p.most, 1)) - freeMoves
	return min(p.slack, leastSlack+perMoved*max(dear, 0))
}
