package sim

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/host"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

// A process has few mappings (vm.max_map_count), and each large piece of pinned or managed
// memory takes one of its own. Small ones share slabs: a slab is one mapping, however
// many pieces lie in it and in whatever order they are freed.
const (
	slabSize  = 2 << 20
	slabPiece = 64 << 10 // the largest piece
)

// shelf holds the slabs of one kind of memory.
type shelf struct {
	slabs []*slab
	reuse bool // what was freed last is taken first
	make  func() ([]byte, error)
	drop  func([]byte) error
}

// slab is memory that small pieces share. Free memory in it reads zero.
type slab struct {
	on    *shelf
	bytes []byte
	free  ranges // offsets
	used  uint64
}

// piece is a part of a slab, in whole pages.
type piece struct {
	of    *slab
	off   uint64
	bytes []byte
}

func (h *shelf) acquire(size uint64) (*piece, error) {
	for _, s := range h.slabs {
		if p := s.acquire(size); p != nil {
			return p, nil
		}
	}
	b, err := h.make()
	if err != nil {
		return nil, err
	}
	s := &slab{on: h, bytes: b}
	s.free.put(span{0, slabSize})
	h.slabs = append(h.slabs, s)
	return s.acquire(size), nil
}

func (s *slab) acquire(size uint64) *piece {
	if size > slabSize-s.used {
		return nil
	}
	off, ok := s.free.acquire(size, host.PageSize(), 0)
	if !ok {
		return nil
	}
	s.used += size
	return &piece{s, off, s.bytes[off : off+size : off+size]}
}

// free frees the piece. The last one of a slab releases that; a slab that the operating
// system refuses to unmap stays, and is used again.
func (p *piece) free() {
	if err := osmem.Forget(p.bytes); err != nil {
		panic(fmt.Sprintf("sim: the system does not take memory back: %v", err))
	}
	s := p.of
	s.free.put(span{p.off, p.off + uint64(len(p.bytes))})
	s.used -= uint64(len(p.bytes))
	if s.on.reuse {
		s.free.cursor = p.off
	}
	if s.used > 0 || s.on.drop(s.bytes) != nil {
		return
	}
	i := slices.Index(s.on.slabs, s)
	s.on.slabs = slices.Delete(s.on.slabs, i, i+1)
}

// close releases all slabs, even those in use.
func (h *shelf) close() {
	for _, s := range h.slabs {
		_ = h.drop(s.bytes)
	}
	h.slabs = nil
}

// newShelves makes the shelves of a machine: of pinned memory, and of managed memory,
// whose slabs lie where the CPU and devices reach them by one address.
func (m *Machine) newShelves() {
	m.pinnedSlabs = shelf{
		reuse: m.options.ReuseAddresses,
		make:  func() ([]byte, error) { return osmem.Alloc(slabSize) },
		drop:  osmem.Free,
	}
	m.managedSlabs = shelf{
		reuse: m.options.ReuseAddresses,
		make: func() ([]byte, error) {
			p, ok := m.acquireAddresses(slabSize, addressAlign, 0)
			if ok && !space.reaches(p) {
				m.giveAddresses(span{p, p + slabSize})
				ok = false
			}
			if !ok {
				return nil, errNoWindow
			}
			b, err := osmem.Commit(p, slabSize)
			if err != nil {
				m.giveAddresses(span{p, p + slabSize})
			}
			return b, err
		},
		drop: func(b []byte) error {
			p := addressOf(b)
			if err := osmem.Clear(p, slabSize); err != nil {
				return err
			}
			m.giveAddresses(span{p, p + slabSize})
			return nil
		},
	}
}

// errNoWindow is returned where the CPU cannot reach device addresses.
var errNoWindow = errors.New("no addresses of this process are left for managed memory")

func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
