// Package profile writes a snapshot as a profile that go tool pprof reads: GPU memory
// by the stack that created it.
//
//	go tool pprof -top -sample_index=inuse_space gpu.pb.gz
//	go tool pprof -tags gpu.pb.gz
//
// The kinds of samples are those of Go's heap profile. inuse_objects and inuse_space
// count live memory: buffers, the requested bytes of a pool's blocks, physical memory
// that the program mapped itself or not at all, and other objects with memory. Memory
// that a pool holds beyond its blocks has the function "(free in pool)". alloc_objects and alloc_space count the allocations in the pools'
// histories, whether they were freed or not. Without a stack (see package inspect) a
// sample's only function is its kind in parentheses, such as "(buffer)".
//
// Samples have the labels device ("device 0", or another location), kind ("buffer",
// "block", "memory", "managed memory" and others) and, for blocks with a tag, tag.
package profile

import (
	"compress/gzip"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/inspect"
)

// Write writes the profile, compressed with gzip.
func Write(w io.Writer, s inspect.Snapshot) error {
	b := builder{strings: map[string]uint64{"": 0}, texts: []string{""}, functions: map[string]uint64{}, samples: map[key]*values{}, s: s}
	b.collect()
	z := gzip.NewWriter(w)
	if _, err := z.Write(b.profile()); err != nil {
		return fmt.Errorf("profile: %w", err)
	}
	if err := z.Close(); err != nil {
		return fmt.Errorf("profile: %w", err)
	}
	return nil
}

// key identifies a sample.
type key struct {
	stack     int // 0 is none
	of        string
	device    string
	kind, tag string
}

// values of a sample: objects and bytes that were allocated and that are in use.
type values [4]uint64

const (
	allocObjects = iota
	allocSpace
	inuseObjects
	inuseSpace
)

var sampleTypes = [4][2]string{{"alloc_objects", "count"}, {"alloc_space", "bytes"}, {"inuse_objects", "count"}, {"inuse_space", "bytes"}}

// builder builds the profile of a snapshot.
type builder struct {
	s       inspect.Snapshot
	order   []key
	samples map[key]*values

	strings   map[string]uint64
	texts     []string
	functions map[string]uint64 // also the locations' numbers
	out       message
}

func (b *builder) add(k key, objects, space, count, bytes int) {
	if k.stack < 1 || k.stack > len(b.s.Stacks) {
		k.stack = 0
	}
	if k.of == "" {
		k.of = "(" + k.kind + ")"
	}
	v := b.samples[k]
	if v == nil {
		v = new(values)
		b.samples[k] = v
		b.order = append(b.order, k)
	}
	v[objects] += uint64(count)
	v[space] += uint64(max(bytes, 0))
}

func (b *builder) inUse(k key, bytes int) { b.add(k, inuseObjects, inuseSpace, 1, bytes) }

func (b *builder) collect() {
	counted := map[uint64]bool{}         // memory that a buffer or a pool accounts for
	sparse := map[inspect.Address]bool{} // whose pages are memory of their source
	for _, x := range b.s.Sparse {
		sparse[x.Ptr] = true
	}
	for _, r := range b.s.Reservations {
		if !sparse[r.Ptr] && b.s.Holder(r) != "" {
			for _, m := range r.Mappings {
				counted[m.Memory] = true
			}
		}
	}
	for _, m := range b.s.Memory {
		if !counted[m.ID] && (m.Mappings > 0 || !b.idle(m)) {
			b.inUse(key{stack: m.Stack, device: m.Location, kind: "memory"}, m.Bytes)
		}
	}
	for _, x := range b.s.Buffers {
		b.inUse(key{stack: x.Stack, device: deviceName(x.Device), kind: "buffer"}, x.Committed)
	}
	for _, p := range b.s.Pools {
		b.pool(p)
	}
	for _, m := range b.s.Managed {
		b.inUse(key{stack: m.Stack, kind: "managed memory"}, m.Bytes)
	}
	for _, o := range b.s.Others {
		if o.Bytes > 0 && !slices.Contains(ofOtherMemory, o.Kind) {
			b.inUse(key{stack: o.Stack, kind: o.Kind}, o.Bytes)
		}
	}
}

// ofOtherMemory are kinds of objects whose bytes are those of memory that is counted
// already.
var ofOtherMemory = []string{"multicast object", "multicast binding"}

// idle reports whether memory that is mapped nowhere belongs to a pool, which counts
// it as free.
func (b *builder) idle(m inspect.Memory) bool {
	for _, p := range b.s.Pools {
		if p.Idle >= m.Bytes && m.Location == deviceName(p.Device) {
			return true
		}
	}
	return false
}

func (b *builder) pool(p inspect.Pool) {
	device, live := deviceName(p.Device), 0
	for _, g := range p.Segments {
		for _, x := range g.Blocks {
			if !x.Waiting {
				b.inUse(key{stack: x.Stack, device: device, kind: "block", tag: x.Tag}, x.Requested)
				live += x.Requested
			}
		}
	}
	if free := p.Reserved - live; free > 0 {
		b.inUse(key{of: "(free in pool)", device: device, kind: "pool"}, free)
	}
	for _, e := range p.History {
		if e.Op == "alloc" {
			b.add(key{stack: e.Stack, device: device, kind: "block", tag: e.Tag}, allocObjects, allocSpace, 1, e.Bytes)
		}
	}
}

// deviceName is a device as the locations of memory name it.
func deviceName(ordinal int) string { return cuda.OnDevice(ordinal).String() }

// The fields of the messages, as the format numbers them.
const (
	profileSampleType = 1
	profileSample     = 2
	profileLocation   = 4
	profileFunction   = 5
	profileStrings    = 6
	profileTime       = 9
	profileDuration   = 10
	profileDefault    = 14

	typeName, typeUnit                          = 1, 2
	sampleLocations, sampleValues, sampleLabels = 1, 2, 3
	labelKey, labelText                         = 1, 2
	locationID, locationLine                    = 1, 4
	lineFunction, lineNumber                    = 1, 2
	functionID, functionName, functionFile      = 1, 2, 4
)

func (b *builder) profile() []byte {
	for _, t := range sampleTypes {
		var m message
		m.number(typeName, b.text(t[0]))
		m.number(typeUnit, b.text(t[1]))
		b.out.bytes(profileSampleType, m)
	}
	for _, k := range b.order {
		b.sample(k, b.samples[k])
	}
	b.out.number(profileTime, uint64(b.s.Time.UnixNano()))
	b.out.number(profileDuration, uint64(max(b.s.Took, time.Nanosecond)))
	b.out.number(profileDefault, b.text(sampleTypes[inuseSpace][0]))
	for _, t := range b.texts {
		b.out.bytes(profileStrings, []byte(t))
	}
	return b.out
}

func (b *builder) sample(k key, v *values) {
	var m message
	var locations []uint64
	if k.stack > 0 {
		for _, f := range public(b.s.Stacks[k.stack-1]) {
			locations = append(locations, b.location(f))
		}
	} else {
		locations = append(locations, b.location(k.of))
	}
	m.numbers(sampleLocations, locations)
	m.numbers(sampleValues, v[:])
	for _, l := range [][2]string{{"device", k.device}, {"kind", k.kind}, {"tag", k.tag}} {
		if l[1] != "" {
			var label message
			label.number(labelKey, b.text(l[0]))
			label.number(labelText, b.text(l[1]))
			m.bytes(sampleLabels, label)
		}
	}
	b.out.bytes(profileSample, m)
}

// inner matches functions of the library that programs cannot call: of internal
// packages, of unexported types, and unexported ones.
var inner = regexp.MustCompile(`^github\.com/cuvmm/cuvmm/(internal/|\S*\.\(\*?[a-z]|\S*\.[a-z]\w*(\[\.\.\.\])?( |$))`)

// public returns a stack without the innermost functions that programs cannot call, so
// that memory is the function's that the program has called.
func public(stack inspect.Stack) inspect.Stack {
	for len(stack) > 1 && inner.MatchString(stack[0]) && !strings.Contains(stack[0], "_test.") {
		stack = stack[1:]
	}
	return stack
}

// location returns the number of a frame's location, and writes it at its first use.
func (b *builder) location(frame string) uint64 {
	if id, known := b.functions[frame]; known {
		return id
	}
	id := uint64(len(b.functions) + 1)
	b.functions[frame] = id
	name, file, line := inspect.Frame(frame)
	var function message
	function.number(functionID, id)
	function.number(functionName, b.text(name))
	function.number(functionFile, b.text(file))
	b.out.bytes(profileFunction, function)
	var at, location message
	at.number(lineFunction, id)
	at.number(lineNumber, uint64(line))
	location.number(locationID, id)
	location.bytes(locationLine, at)
	b.out.bytes(profileLocation, location)
	return id
}

// text returns the number of a string.
func (b *builder) text(s string) uint64 {
	n, known := b.strings[s]
	if !known {
		n = uint64(len(b.texts))
		b.strings[s] = n
		b.texts = append(b.texts, s)
	}
	return n
}
