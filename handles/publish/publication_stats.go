package publish

import (
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
)

// Stats are a publication's numbers.
type Stats struct {
	Name string
	// Generation counts the changes; Length elements and Bytes of memory, in
	// Chunks, are shown.
	Generation uint64
	Length     int
	Bytes      int
	Chunks     int
	// Pinned bytes are no longer shown, and still mapped by followers: the sum
	// over them, each of which may keep the same memory.
	Pinned int
	// Followers, in no order.
	Followers []FollowerStats
}

// FollowerStats are what a publisher knows of one follower.
type FollowerStats struct {
	// Peer is the follower's process; it is not Known over an inherited
	// connection.
	Peer  peer.Credentials
	Known bool
	Since time.Time
	// Generation is the last that the follower has acknowledged or refused, and
	// Length the elements that it has.
	Generation uint64
	Length     int
	// Bytes of memory, in Chunks, that the follower has mapped, or is about to.
	Bytes, Chunks int
	// Pinned bytes of those are no longer shown.
	Pinned int
	// Refused is why the follower did not take the last generation, in its own
	// words, or empty.
	Refused string
}

// Stats are the publication's numbers now.
func (p *Publication) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	st := Stats{Name: p.name, Generation: p.view.generation, Length: int(p.view.length),
		Bytes: int(sizeOf(p.view.chunks)), Chunks: len(p.view.chunks)}
	for f := range p.followers {
		fs := FollowerStats{Peer: f.on.who.Credentials, Known: f.on.who.known, Since: f.since, Generation: f.feed.told, Length: int(f.feed.length),
			Bytes: int(sizeOf(f.feed.has) + sizeOf(f.feed.sent)), Chunks: len(f.feed.has) + len(f.feed.sent),
			Pinned: int(f.feed.pinned(p.view)), Refused: f.feed.reason}
		st.Pinned += fs.Pinned
		st.Followers = append(st.Followers, fs)
	}
	return st
}
