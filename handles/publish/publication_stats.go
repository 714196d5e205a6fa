package publish

import (
	"maps"
	"slices"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
)

// Stats describes a publication at one moment, and its followers.
type Stats struct {
	Name string
	// Generation counts the changes of what is shown: Length elements, in Bytes of
	// memory, in Chunks.
	Generation uint64
	Length     int
	Bytes      int
	Chunks     int
	// Pinned is the memory in bytes that is no longer shown and still mapped by
	// followers: the sum over the followers, several of which may keep the same memory.
	Pinned int
	// Rewriting: Rewrite was called, and no Announce ended that yet.
	Rewriting bool
	// Suspended: the memory is suspended, or about to be. Nothing is shown until it is back.
	Suspended bool
	// Followers are in no order.
	Followers []FollowerStats
}

// FollowerStats describes one follower, as its publisher knows it.
type FollowerStats struct {
	// Peer is the follower's process. Known is false over an inherited connection.
	Peer  peer.Credentials
	Known bool
	Since time.Time
	// Generation is the last that the follower has acknowledged or refused, and
	// Length the elements that it has.
	Generation uint64
	Length     int
	// Bytes of memory, in Chunks, are mapped by the follower, or about to be.
	Bytes, Chunks int
	// Pinned bytes of those are no longer shown.
	Pinned int
	// Refused is the follower's reason for refusing the last generation, or empty.
	Refused string
	// Reads: it has not released what it shows (Follower.Release).
	Reads bool
}

// Stats returns the publication's numbers. With many followers they are not all of
// one moment: the publication is locked for a part of its followers at a time, so
// that Stats does not hold up announcements.
func (p *Publication) Stats() Stats {
	if p == nil {
		return Stats{}
	}
	v := p.viewNow()
	st := Stats{Name: p.name, Generation: v.generation, Length: int(v.length), Bytes: int(sizeOf(v.chunks)), Chunks: len(v.chunks)}
	p.mu.Lock()
	st.Rewriting = p.rewriting == opening || p.rewriting == open
	st.Suspended = p.rewriting == leaving || p.rewriting == away
	followers := slices.Collect(maps.Keys(p.followers))
	p.mu.Unlock()
	for some := range slices.Chunk(followers, statsStep) {
		for _, s := range p.samples(some) {
			fs := s.stats()
			st.Pinned += fs.Pinned
			st.Followers = append(st.Followers, fs)
		}
	}
	return st
}

// statsStep is the number of followers that are read under one lock.
const statsStep = 256

// sample is the state of a follower at one moment. Its slices are never changed in
// place, so that they are summed without the lock.
type sample struct {
	f                *replicator
	has, sent, shown []chunk
	told, length     uint64
	reason           string
	reads            bool
}

// samples reads some followers. Followers that have left are missing.
func (p *Publication) samples(of []*replicator) []sample {
	all := make([]sample, 0, len(of))
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range of {
		if _, there := p.followers[f]; there {
			g := f.progress
			all = append(all, sample{f, g.has, g.sent, p.view.chunks, g.told, g.length, g.reason, f.reads()})
		}
	}
	return all
}

func (s *sample) stats() FollowerStats {
	of := s.f.on.client
	return FollowerStats{Peer: of.Credentials, Known: of.known, Since: s.f.since, Generation: s.told, Length: int(s.length),
		Bytes: int(sizeOf(s.has) + sizeOf(s.sent)), Chunks: len(s.has) + len(s.sent),
		Pinned: int(pinned(s.has, s.sent, s.shown)), Refused: s.reason, Reads: s.reads}
}

// viewNow returns what is shown. Its chunks are never changed in place.
func (p *Publication) viewNow() view {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.view
}
