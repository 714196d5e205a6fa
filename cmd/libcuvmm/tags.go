//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/suspend"
	"github.com/cuvmm/cuvmm/vmm"
)

// Pools, segments and ranges sleep and wake by their tags. A tag is awake, or its Suspension is
// in the table; memory of the tag is made only while it is awake, so that all of it sleeps.
var tags struct {
	turn sync.Mutex // held over a call that suspends, resumes or discards

	mu     sync.RWMutex // for reading while memory is made, for writing while the table changes
	asleep map[cuda.Tag]*vmm.Suspension
}

// whileAwake makes memory of a tag, unless that sleeps.
func whileAwake(op string, tag cuda.Tag, make func() error) error {
	tags.mu.RLock()
	defer tags.mu.RUnlock()
	if _, asleep := tags.asleep[tag]; asleep {
		return errs.New(errs.Failure{Op: op, Kind: errs.Suspended, Asked: "memory of " + called(tag) + ", which sleeps", Hint: "resume it first"})
	}
	return make()
}

func called(tag cuda.Tag) string {
	if tag == "" {
		return "the memory without a tag"
	}
	return fmt.Sprintf("tag %q", tag)
}

// mark notes that tags sleep, before what they have is listed, or that they are awake.
func mark(of []cuda.Tag, s *vmm.Suspension, asleep bool) {
	tags.mu.Lock()
	defer tags.mu.Unlock()
	if tags.asleep == nil {
		tags.asleep = map[cuda.Tag]*vmm.Suspension{}
	}
	for _, t := range of {
		if tags.asleep[t] = s; !asleep {
			delete(tags.asleep, t)
		}
	}
}

// partition returns which of the named tags are awake, and which sleep; none named stands for all
// that there are.
func partition(op string, named []cuda.Tag) (awake, asleep []cuda.Tag, err error) {
	there, all := allTags(), named
	if len(named) == 0 {
		all = there
	}
	tags.mu.RLock()
	defer tags.mu.RUnlock()
	for _, t := range slices.Compact(slices.Sorted(slices.Values(all))) {
		switch _, sleeps := tags.asleep[t]; {
		case sleeps:
			asleep = append(asleep, t)
		case !slices.Contains(there, t):
			return nil, nil, errs.Invalid(op, called(t)+", which no memory has", "name tags that pools, segments or ranges were made with")
		default:
			awake = append(awake, t)
		}
	}
	return awake, asleep, nil
}

// allTags returns each tag of the process's memory once, and those that sleep.
func allTags() (all []cuda.Tag) {
	if of := pools.Load(); of != nil {
		for _, e := range *of {
			all = append(all, e.pool.Tag())
			e.mu.Lock()
			for _, b := range e.segments {
				all = append(all, b.Tag())
			}
			for _, r := range e.ranges {
				all = append(all, r.Tag())
			}
			e.mu.Unlock()
		}
	}
	tags.mu.RLock()
	defer tags.mu.RUnlock()
	for t := range tags.asleep {
		all = append(all, t)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

func memoryOf(of []cuda.Tag) (all []vmm.Memory) {
	open.Lock()
	in := sys
	open.Unlock()
	for _, t := range of {
		all = append(all, vmm.Tagged(in, t)...)
	}
	return all
}

// suspendTags gives back the memory of tags: of all that are awake if none is named.
func suspendTags(op string, named []cuda.Tag, o vmm.SuspendOptions) (vmm.Report, error) {
	tags.turn.Lock()
	defer tags.turn.Unlock()
	awake, asleep, err := partition(op, named)
	if err != nil {
		return vmm.Report{}, err
	}
	if len(named) > 0 && len(asleep) > 0 {
		return vmm.Report{}, errs.New(errs.Failure{Op: op, Kind: errs.Suspended, Asked: called(asleep[0]) + ", which sleeps already", Hint: "name tags that are awake"})
	}
	return suspendAwake(awake, o)
}

func suspendAwake(awake []cuda.Tag, o vmm.SuspendOptions) (vmm.Report, error) {
	mark(awake, nil, true)
	var s *vmm.Suspension
	err := withMemory(awake, func(memory []vmm.Memory) (err error) {
		s, err = vmm.Suspend(context.Background(), o, memory...)
		return err
	})
	if s == nil {
		mark(awake, nil, false)
		return vmm.Report{}, err
	}
	mark(awake, s, true)
	return s.Report(), nil
}

// withMemory calls do with the memory of tags, unless there is none, and again without what is
// freed meanwhile.
func withMemory(of []cuda.Tag, do func(memory []vmm.Memory) error) error {
	for {
		memory := memoryOf(of)
		if len(memory) == 0 {
			return nil
		}
		if err := do(memory); !errors.Is(err, cuda.ErrClosed) {
			return err
		}
	}
}

// resumeTags brings back the memory of tags, and of all that sleep if none is named. What is awake
// stays so. It waits so long for room.
func resumeTags(named []cuda.Tag, wait time.Duration) error {
	const op = "cuvmm_resume"
	tags.turn.Lock()
	defer tags.turn.Unlock()
	ctx := context.Background()
	if wait > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, wait)
		defer cancel()
	}
	return eachAsleep(op, named, func(s *vmm.Suspension, of []cuda.Tag) error {
		err := withMemory(of, func(memory []vmm.Memory) error { return s.Resume(ctx, memory...) })
		if err == nil {
			mark(of, nil, false)
		}
		return err
	})
}

// discardTags gives back the memory of tags that are awake, and what is kept of those that sleep.
func discardTags(named []cuda.Tag) (err error) {
	const op = "cuvmm_discard"
	tags.turn.Lock()
	defer tags.turn.Unlock()
	if err := eachAsleep(op, named, func(s *vmm.Suspension, of []cuda.Tag) error {
		return withMemory(of, func(memory []vmm.Memory) error { return s.Forget(context.Background(), memory...) })
	}); err != nil {
		return err
	}
	awake, _, err := partition(op, named)
	if err == nil {
		_, err = suspendAwake(awake, vmm.SuspendOptions{Keep: vmm.Drop})
	}
	return err
}

// eachAsleep calls do for each Suspension of the named tags, with those that it has. The caller
// has the turn.
func eachAsleep(op string, named []cuda.Tag, do func(s *vmm.Suspension, of []cuda.Tag) error) error {
	_, asleep, err := partition(op, named)
	if err != nil {
		return err
	}
	for len(asleep) > 0 {
		s := tags.asleep[asleep[0]] // the table changes in turn
		var of []cuda.Tag
		asleep = slices.DeleteFunc(asleep, func(t cuda.Tag) bool {
			if tags.asleep[t] == s {
				of = append(of, t)
			}
			return tags.asleep[t] == s
		})
		if err := do(s, of); err != nil {
			return err
		}
	}
	return nil
}

// tagged is what cuvmm_tags says of a tag.
type tagged struct {
	Tag       cuda.Tag    `json:"tag"`
	Suspended bool        `json:"suspended"`
	Ranges    [][2]uint64 `json:"ranges"` // addresses, and their bytes
}

func describeTags() []tagged {
	all := []tagged{} // which is no null in JSON
	for _, t := range allTags() {
		tags.mu.RLock()
		_, asleep := tags.asleep[t]
		tags.mu.RUnlock()
		d := tagged{Tag: t, Suspended: asleep, Ranges: [][2]uint64{}}
		for _, m := range memoryOf([]cuda.Tag{t}) {
			for _, a := range suspend.Of(m).Addresses() {
				d.Ranges = append(d.Ranges, [2]uint64{uint64(a.Ptr), a.Bytes})
			}
		}
		slices.SortFunc(d.Ranges, func(a, b [2]uint64) int { return cmp.Compare(a[0], b[0]) })
		all = append(all, d)
	}
	return all
}
