package publish

import (
	"encoding/binary"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/sharedpage"
	"github.com/cuvmm/cuvmm/internal/wait"
	"github.com/cuvmm/cuvmm/vmm"
)

// Page is what outlives a publication's process beside the memory: words that say which generation is
// complete, and whether it is being rewritten. The process that publishes the memory next goes on by
// them ([PublishOptions].Page). A broker keeps both: see Client.Keep in package broker. The owner closes it.
type Page struct {
	id     identity
	base   driver.Ptr // of the memory, which has so many bytes
	bytes  uint64
	file   *peer.FD
	closer life.Closer
	// used is taken by the publication that writes the words, until its stream is closed.
	used wait.Slot
}

// NewPage makes the page of a buffer's memory, which keeps its length. The file is one of NewPageFile, and the page owns it.
// Every process that publishes the memory names it by the same random number. Imported memory is neither published without
// its page from then on, nor moved, sent or leased. It is for brokers.
func NewPage(id [16]byte, memory *vmm.Buffer, file *peer.FD) *Page {
	if memory == nil {
		return &Page{} // which Publish refuses
	}
	m := share.Of(memory)
	m.SetKept()
	return &Page{id: id, base: m.About().Base, bytes: m.Used(), file: file, used: wait.NewSlot()}
}

// NewPageFile makes the file of a page, of a publication that has shown nothing. It is for brokers.
func NewPageFile() (*peer.FD, error) {
	const op = "publish.NewPageFile"
	p, n, err := sharedpage.New()
	if err != nil {
		return nil, errs.SystemCall(op, "a page", err)
	}
	_ = p.Close() // the publisher maps it
	return peer.NewFD(n)
}

// Close waits until no publication writes the page any more: close its server first. Idempotent.
func (k *Page) Close() error {
	if k == nil || k.used == nil {
		return errs.PeerInvalid("publish.Page.Close", "a nil or zero page", "take one from a broker")
	}
	return k.closer.Close(func() error {
		k.used <- struct{}{}
		return k.file.Close()
	})
}

// kept is a publication's side of a page: a slot that is written as if it were a follower's, but that
// what shows the same elements as another generation is complete by a write of its own.
type kept struct {
	of   *Page
	page *page
}

// take has a publication of memory write the page, and returns what it continues.
func (k *Page) take(op string, m share.Memory, unit uint64, incomplete bool) (from *legacy, err error) {
	if k.used == nil {
		return nil, errs.PeerInvalid(op, "a zero PublishOptions.Page", "take one from a broker")
	}
	if used := m.Used(); used != k.bytes || used%unit != 0 {
		return nil, errs.PeerInvalid(op, fmt.Sprintf("memory of %s in elements of %s, where %s outlive this process", errs.Bytes(used), errs.Bytes(unit), errs.Bytes(k.bytes)),
			"publish the whole memory that came with the page, before it is closed")
	}
	if m.About().Base != k.base {
		return nil, errs.PeerInvalid(op, "a page of other memory", "publish the memory that came with the page")
	}
	if k.closer.Closed() {
		return nil, errs.PeerClosed(op, "page")
	}
	if !k.used.Try() {
		return nil, errs.Peer(op, cuda.ErrInUse, "a page that another publication writes", "close its server, or wait until one that was withdrawn is Released")
	}
	defer func() {
		if err != nil {
			k.used.Give()
		}
	}()
	var shared *sharedpage.Page
	err = k.file.Use(func(n int) (err error) {
		shared, err = sharedpage.Open(n)
		return err
	})
	if err != nil {
		return nil, errs.PeerCause(err, op, cuda.ErrInvalidArgument, "PublishOptions.Page", "make its file with NewPageFile")
	}
	link.Of(k.file).SetForeign(false)
	w, err := newPageSlot(op, m.About().Device, shared)
	if err != nil {
		return nil, err
	}
	read := w.seen()
	from = &legacy{identity: k.id, generation: max(read.complete, read.flux, read.cut), last: version{generation: read.complete, length: int(k.bytes / unit)},
		torn: read.complete > 0 && read.flux >= read.complete, flux: read.flux, cut: read.cut, kept: &kept{k, &page{slot: w, users: 1}}}
	switch {
	case from.generation >= lastGeneration:
		err = errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d generations", from.generation), "have the broker make other memory")
	case from.torn && !incomplete:
		err = errs.Peer(op, ErrIncomplete, "memory that was being rewritten when its publisher ended, or whose publication was withdrawn", "PublishOptions.Incomplete publishes it to be written anew")
	}
	if err != nil {
		return nil, w.drop(op, err)
	}
	return from, nil
}

// drop gives the page back after a publication of it failed with cause.
func (k *kept) drop(op string, cause error) error {
	defer k.of.used.Give()
	return k.page.slot.drop(op, cause)
}

// chunk returns the chunk of the memory at a place. It is the same for every publisher, and no other
// publication's.
func (k *kept) chunk(place int, size uint64) chunk {
	return chunk{binary.LittleEndian.Uint64(k.of.id[:]) + uint64(place), size}
}

// showsAll refuses another length than that of all memory, of a publication with a page: its words do not say which
// length a generation had.
func (p *Publication) showsAll(op string, length int) error {
	if p.kept == nil || uint64(length)*p.unit == p.kept.of.bytes {
		return nil
	}
	return errs.Peer(op, cuda.ErrNotSupported, fmt.Sprintf("a length of %d, of a publication that outlives its process", length), fmt.Sprintf("show all %d elements at once", p.kept.of.bytes/p.unit))
}
