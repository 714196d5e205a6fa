package publish

import (
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/lock"
)

// rates bounds the rate of requests of each process, with a token bucket for each.
type rates struct {
	perSecond, burst int

	mu  lock.Mutex[lock.Leaf]
	all map[peer.Credentials]*bucket
}

type bucket struct {
	tokens float64
	at     time.Time
}

// acquire takes a token, and returns how long the process must wait for it.
func (r *rates) acquire(of peer.Credentials, now time.Time) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	b := r.all[of]
	if b == nil {
		r.prune(now)
		b = &bucket{tokens: float64(r.burst), at: now}
		if r.all == nil {
			r.all = map[peer.Credentials]*bucket{}
		}
		r.all[of] = b
	}
	r.fill(b, now)
	b.tokens--
	if b.tokens >= 0 {
		return 0
	}
	return time.Duration(-b.tokens / float64(r.perSecond) * float64(time.Second))
}

func (r *rates) fill(b *bucket, now time.Time) {
	b.tokens = min(float64(r.burst), b.tokens+now.Sub(b.at).Seconds()*float64(r.perSecond))
	b.at = now
}

// prune removes full buckets, which are as good as none. The caller holds the lock.
func (r *rates) prune(now time.Time) {
	if len(r.all) < mostBuckets {
		return
	}
	for of, b := range r.all {
		if r.fill(b, now); b.tokens >= float64(r.burst) {
			delete(r.all, of)
		}
	}
}

// mostBuckets is how many buckets there are before full ones are removed.
const mostBuckets = 256
