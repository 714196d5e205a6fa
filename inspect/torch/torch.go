// Package torch writes snapshots as PyTorch's memory snapshots, for its viewer
// (torch.cuda._memory_viz, memory_viz): segments with their blocks, and the history of
// pools as a trace. The code of PyTorch 2.11's viewer reads them.
package torch

import (
	"bufio"
	"fmt"
	"io"
	"slices"

	"github.com/cuvmm/cuvmm/inspect"
)

// Write writes the pickle. A pool's segments become segments, and a buffer becomes one
// with its bytes in use as its only block. Events of a pool's history are left out if
// their memory is no longer mapped, because the viewer shows mapped memory only.
func Write(w io.Writer, s inspect.Snapshot) error {
	if err := checkDevices(s); err != nil {
		return fmt.Errorf("torch: %w", err)
	}
	b := bufio.NewWriter(w)
	p := &pickler{w: b, strings: map[string]int{}}
	d := document{p: p, s: s, frames: make([]int, len(s.Stacks))}
	p.raw("\x80\x04") // protocol 4
	d.write()
	p.raw(".")
	if err := b.Flush(); err != nil {
		return fmt.Errorf("torch: %w", err)
	}
	return nil
}

// document writes a snapshot.
type document struct {
	p *pickler
	s inspect.Snapshot
	// frames are the memo indexes of written stacks plus 1; 0 is not written.
	frames []int
	// segments are the written ranges of each device.
	segments [][]span
}

// span is a range of addresses.
type span struct{ from, to inspect.Address }

func (d *document) write() {
	d.segments = make([][]span, d.devices())
	d.p.dict(func() {
		d.p.key("segments")
		var list []func()
		for _, p := range d.s.Pools {
			for _, g := range p.Segments {
				list = append(list, func() { d.segment(p.Device, g) })
			}
		}
		for _, b := range d.s.Buffers {
			if b.Committed > 0 {
				list = append(list, func() { d.buffer(b) })
			}
		}
		d.p.list(list)

		d.p.key("device_traces")
		var traces []func()
		for device := range d.segments {
			traces = append(traces, func() { d.trace(device) })
		}
		d.p.list(traces)

		d.p.key("allocator_settings")
		d.p.dict(func() {
			d.p.key("expandable_segments")
			d.p.boolean(true)
		})
	})
}

// devices returns the number of devices that the snapshot mentions.
func (d *document) devices() int {
	n := len(d.s.Devices)
	for _, p := range d.s.Pools {
		n = max(n, p.Device+1)
	}
	for _, b := range d.s.Buffers {
		n = max(n, b.Device+1)
	}
	return n
}

// checkDevices returns an error for a device that no snapshot has: each number up to the
// largest becomes a list.
func checkDevices(s inspect.Snapshot) error {
	const most = 1 << 10
	for _, p := range s.Pools {
		if p.Device < 0 || p.Device >= most {
			return fmt.Errorf("pool %d is on device %d, of at most %d", p.Serial, p.Device, most)
		}
	}
	for _, b := range s.Buffers {
		if b.Device < 0 || b.Device >= most {
			return fmt.Errorf("the buffer at %v is on device %d, of at most %d", b.Ptr, b.Device, most)
		}
	}
	return nil
}

// block is a block or the free memory between two.
type block struct {
	bytes, requested int
	state            string
	stack            int
}

func (d *document) segment(device int, g inspect.Segment) {
	var blocks []block
	allocated, active, requested, end := 0, 0, 0, 0
	for _, b := range g.Blocks {
		if b.Offset > end {
			blocks = append(blocks, block{bytes: b.Offset - end, state: "inactive"})
		}
		state := "active_allocated"
		active += b.Bytes
		if b.Waiting {
			state = "active_pending_free"
		} else {
			allocated += b.Bytes
			requested += b.Requested
		}
		blocks = append(blocks, block{b.Bytes, b.Requested, state, b.Stack})
		end = b.Offset + b.Bytes
	}
	if g.Bytes > end {
		blocks = append(blocks, block{bytes: g.Bytes - end, state: "inactive"})
	}
	size := "large"
	if g.Kind == "slab" {
		size = "small"
	}
	d.put(device, g.Ptr, g.Bytes, uint64(g.Stream), size, allocated, active, requested, 0, blocks)
}

func (d *document) buffer(b inspect.Buffer) {
	var blocks []block
	if b.Used > 0 {
		blocks = append(blocks, block{b.Used, b.Used, "active_allocated", b.Stack})
	}
	if b.Committed > b.Used {
		blocks = append(blocks, block{bytes: b.Committed - b.Used, state: "inactive", stack: b.Stack})
	}
	d.put(b.Device, b.Ptr, b.Committed, 0, "large", b.Used, b.Used, b.Used, b.Stack, blocks)
}

func (d *document) put(device int, ptr inspect.Address, bytes int, stream uint64, size string, allocated, active, requested, stack int, blocks []block) {
	d.segments[device] = append(d.segments[device], span{ptr, ptr + inspect.Address(bytes)})
	p := d.p
	p.dict(func() {
		for _, n := range []struct {
			key   string
			value uint64
		}{{"device", uint64(device)}, {"address", uint64(ptr)}, {"total_size", uint64(bytes)}, {"allocated_size", uint64(allocated)},
			{"active_size", uint64(active)}, {"requested_size", uint64(requested)}, {"stream", stream}} {
			p.key(n.key)
			p.number(n.value)
		}
		p.key("segment_type")
		p.text(size)
		p.key("segment_pool_id")
		p.number(0)
		p.number(0)
		p.raw("\x86") // a tuple of two
		p.key("is_expandable")
		p.boolean(true)
		p.key("frames")
		d.stack(stack)
		p.key("blocks")
		list := make([]func(), len(blocks))
		at := ptr
		for i, b := range blocks {
			from := at
			list[i] = func() {
				p.dict(func() {
					p.key("address")
					p.number(uint64(from))
					p.key("size")
					p.number(uint64(b.bytes))
					p.key("requested_size")
					p.number(uint64(b.requested))
					p.key("state")
					p.text(b.state)
					p.key("frames")
					d.stack(b.stack)
				})
			}
			at += inspect.Address(b.bytes)
		}
		p.list(list)
	})
}

func (d *document) trace(device int) {
	known := d.segments[device]
	slices.SortFunc(known, func(a, b span) int {
		if a.from < b.from {
			return -1
		}
		return 1
	})
	mapped := func(e inspect.Event) bool {
		at, _ := slices.BinarySearchFunc(known, e.Ptr, func(s span, p inspect.Address) int {
			if s.to <= p {
				return -1
			}
			return 1
		})
		return at < len(known) && known[at].from <= e.Ptr && e.Ptr+inspect.Address(e.Bytes) <= known[at].to
	}
	var list []func()
	for _, p := range d.s.Pools {
		if p.Device != device {
			continue
		}
		for _, e := range p.History {
			if !mapped(e) {
				continue
			}
			actions := []string{"alloc"}
			if e.Op == "free" {
				actions = []string{"free_requested", "free_completed"}
			}
			for _, action := range actions {
				list = append(list, func() { d.event(action, e) })
			}
		}
	}
	d.p.list(list)
}

func (d *document) event(action string, e inspect.Event) {
	p := d.p
	p.dict(func() {
		p.key("action")
		p.text(action)
		p.key("addr")
		p.number(uint64(e.Ptr))
		p.key("size")
		p.number(uint64(e.Bytes))
		p.key("stream")
		p.number(uint64(e.Stream))
		p.key("time_us")
		p.number(uint64(e.Time.UnixMicro()))
		p.key("frames")
		d.stack(e.Stack)
	})
}

// stack writes the frames of a stack, the innermost first, in full at its first use.
func (d *document) stack(n int) {
	if n < 1 || n > len(d.frames) {
		d.p.list(nil)
		return
	}
	if at := d.frames[n-1]; at > 0 {
		d.p.get(at - 1)
		return
	}
	var list []func()
	for _, f := range d.s.Stacks[n-1] {
		name, file, line := inspect.Frame(f)
		list = append(list, func() {
			d.p.dict(func() {
				d.p.key("filename")
				d.p.text(file)
				d.p.key("line")
				d.p.number(uint64(line))
				d.p.key("name")
				d.p.text(name)
			})
		})
	}
	at := d.p.memo
	d.p.memo++
	d.p.raw("]\x94")
	d.p.appended(list)
	d.frames[n-1] = at + 1
}
