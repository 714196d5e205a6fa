package multicast

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/memspec"
	"github.com/cuvmm/cuvmm/internal/phys"
	"github.com/cuvmm/cuvmm/internal/vrange"
	"github.com/cuvmm/cuvmm/vmm"
)

// The steps, in order. Each ends when all ranks have done their part, so that no rank binds
// or maps before all have added their devices, and the creator keeps the object until all
// have imported it.
const (
	stepPlan   = "plan"
	stepAgree  = "agree on the handle type"
	stepMemory = "make memory"
	stepCreate = "create"
	stepImport = "import"
	stepAdd    = "add devices"
	stepBind   = "bind"
	stepMap    = "map"
)

// plan is what a rank contributes.
type plan struct {
	Size        int
	Granularity uint64
	Devices     []cuda.UUID
}

// form performs all steps. No other goroutine has the team yet.
func (t *Team) form(ctx context.Context, size int) error {
	facts, err := t.plan(ctx, size)
	if err != nil {
		return err
	}
	by := vmm.NoHandles // a single rank does not share
	if t.group.Size() > 1 {
		a, err := rendezvous.Agree(ctx, t.group, facts)
		if err != nil {
			return broken(stepAgree, err, nil)
		}
		by = a.Handle
	}
	if err := t.do(ctx, stepMemory, func() error { return t.makeMemory(by) }); err != nil {
		return err
	}
	if err := t.share(ctx, by); err != nil {
		return err
	}
	for _, s := range []struct {
		name string
		do   func() error
	}{{stepAdd, t.add}, {stepBind, t.bind}, {stepMap, t.mapAll}} {
		if err := t.do(ctx, s.name, s.do); err != nil {
			return err
		}
	}
	return nil
}

// do performs a step without contributions.
func (t *Team) do(ctx context.Context, name string, do func() error) error {
	a, err := t.step(ctx, name, t.part(name, func() (offering, error) { return offering{}, do() }))
	if err == nil {
		a.close()
	}
	return err
}

// plan exchanges the plans of all ranks and checks them.
func (t *Team) plan(ctx context.Context, size int) (rendezvous.Facts, error) {
	var facts rendezvous.Facts
	a, err := t.step(ctx, stepPlan, t.part(stepPlan, func() (offering, error) {
		const op = "multicast.NewTeam"
		if size <= 0 || size > maxBytes {
			return offering{}, errs.Invalid(op, "a size of "+errs.Count(size, "byte"), "ask for as much as each device is to have")
		}
		if limit := t.options.CallTimeout; limit < 0 {
			return offering{}, errs.Invalid(op, fmt.Sprintf("a CallTimeout of %v", limit), fmt.Sprintf("use 0 for %v, or more", DefaultCallTimeout))
		}
		if err := Supported(t.devices...); err != nil {
			return offering{}, err
		}
		p := plan{Size: size}
		for _, d := range t.devices {
			p.Devices = append(p.Devices, d.UUID())
			g, err := vmm.GranularityOf(d, vmm.Properties{})
			if err != nil {
				return offering{}, err
			}
			p.Granularity = max(p.Granularity, uint64(g))
		}
		g, err := granularity(op, core.SystemOf(t.devices[0]), Properties{Devices: len(t.devices), Granularity: t.options.Granularity})
		if err != nil {
			return offering{}, err
		}
		p.Granularity = max(p.Granularity, g)
		if t.group.Size() > 1 {
			types, err := shareable(t.devices)
			if err != nil {
				return offering{}, err
			}
			facts = rendezvous.FactsOf(t.devices[0], types) // which queries NVML
		}
		return offering{body: p}, nil
	}))
	if err != nil {
		return rendezvous.Facts{}, err
	}
	defer a.close()
	return facts, t.settle(a.reports)
}

// settle computes the team from all plans. All ranks compute the same.
func (t *Team) settle(reports []report) error {
	plans := make([]plan, len(reports))
	var others []int
	for rank, r := range reports {
		if err := json.Unmarshal(r.Body, &plans[rank]); err != nil || len(plans[rank].Devices) == 0 || plans[rank].Granularity == 0 {
			return disagree(stepPlan, peer.ErrProtocol, []int{rank}, "rank %d sent an invalid message", rank)
		}
		if plans[rank].Size != plans[0].Size {
			others = append(others, rank)
		}
	}
	if len(others) > 0 {
		return disagree(stepPlan, rendezvous.ErrDisagree, others, "ranks %v pass another size than the %d bytes of rank 0: pass the same on all ranks", others, plans[0].Size)
	}
	var gran uint64
	owner := map[cuda.UUID]int{}
	for rank, p := range plans {
		if rank == t.group.Rank() {
			t.first = t.members
		}
		for _, d := range p.Devices {
			if before, twice := owner[d]; twice && d != (cuda.UUID{}) {
				return disagree(stepPlan, cuda.ErrInvalidArgument, []int{before, rank}, "ranks %d and %d both pass device %v: each device takes part once", before, rank, d)
			}
			owner[d] = rank
		}
		t.members += len(p.Devices)
		gran = max(gran, p.Granularity)
	}
	t.size = int((uint64(plans[0].Size) + gran - 1) / gran * gran)
	return nil
}

// shareable returns the handle types that work on all devices.
func shareable(devices []*cuda.Device) (vmm.HandleTypes, error) {
	types := vmm.PosixFD | vmm.Fabric
	for _, d := range devices {
		p, err := d.Probe()
		if err != nil {
			return 0, err
		}
		if !p.PosixFD {
			types &^= vmm.PosixFD
		}
		if !p.Fabric {
			types &^= vmm.Fabric
		}
	}
	return types, nil
}

// makeMemory creates the replicas, each mapped at its own address, and the abort word.
func (t *Team) makeMemory(by vmm.HandleTypes) (err error) {
	if t.word == nil {
		if t.word, err = newAbortWord(t.devices[0]); err != nil {
			return err
		}
		t.own("abort word", t.word.close)
	}
	for _, d := range t.devices[len(t.replicas):] {
		var r replica
		if err := t.whole(func() (err error) {
			if r.memory, err = vmm.Create(d, t.size, vmm.Properties{Handles: by}); err != nil {
				return err
			}
			t.own("memory", r.memory.Close)
			r.at, err = t.mapped(d, r.memory, []*cuda.Device{d})
			return err
		}); err != nil {
			return err
		}
		t.replicas = append(t.replicas, r)
	}
	return nil
}

// mapped maps memory at a range of its own, for devices. It does not use a vmm.Mapping,
// whose Close would wait for work: the team has waited.
func (t *Team) mapped(d *cuda.Device, p vmm.Physical, devices []*cuda.Device) (*vmm.Reservation, error) {
	const op = "multicast.NewTeam"
	var access []vmm.Access
	for _, d := range devices {
		access = append(access, vmm.Access{Location: d.Location(), Mode: vmm.ReadWrite})
	}
	h, open := phys.Acquire(p)
	if !open {
		return nil, errs.ClosedError(op, "memory")
	}
	grants, err := memspec.CheckAccess(op, d.System(), h.Asked.Location, access)
	if err != nil {
		return nil, phys.Abandon(op, err, h)
	}
	r, err := vmm.Reserve(d, t.size, vmm.ReserveOptions{})
	if err != nil {
		return nil, phys.Abandon(op, err, h)
	}
	mapped := false
	t.own("address range", func() error {
		if mapped {
			mapped = false // after an error, Close of the range tries it again
			if err := vrange.Of(r).UnmapRun(op, 0, uint64(t.size)); err != nil {
				return err
			}
		}
		return r.Close()
	})
	if err := vrange.Of(r).MapRun(op, 0, []*phys.Handle{h}, grants); err != nil {
		return nil, phys.Abandon(op, err, h)
	}
	mapped = true
	return r, nil
}

// share creates the object on rank 0 and imports it on the others.
func (t *Team) share(ctx context.Context, by vmm.HandleTypes) error {
	sys := t.devices[0].System()
	var make func() (offering, error)
	if t.group.Rank() == 0 {
		make = t.part(stepCreate, func() (offering, error) { return t.create(by) })
	}
	a, err := t.step(ctx, stepCreate, make)
	if err != nil {
		return err
	}
	// An import that has not returned still uses the descriptor.
	t.own("descriptor", func() error { a.close(); return nil })
	defer func() {
		if t.late == nil {
			a.close()
		}
	}()
	return t.do(ctx, stepImport, func() (err error) {
		if t.group.Rank() == 0 {
			return nil
		}
		from := a.contributions[0]
		switch {
		case by == vmm.Fabric:
			var h cuda.FabricHandle
			if err := json.Unmarshal(a.reports[0].Body, &h); err != nil {
				return fmt.Errorf("%w: rank 0 sent no fabric handle: %w", peer.ErrProtocol, err)
			}
			t.object, err = ImportFabric(sys, h, t.size, t.members)
		case len(from.Files) != 1:
			return fmt.Errorf("%w: rank 0 sent %d descriptors", peer.ErrProtocol, len(from.Files))
		default:
			t.object, err = Import(sys, from.Files[0], t.size, t.members)
		}
		if err == nil {
			t.own("multicast object", t.object.Close)
		}
		return err
	})
}

func (t *Team) create(by vmm.HandleTypes) (o offering, err error) {
	if t.object == nil {
		t.object, err = Create(t.devices[0].System(), t.size, Properties{Devices: t.members, Handles: by, Granularity: t.options.Granularity})
		if err != nil {
			return o, err
		}
		t.own("multicast object", t.object.Close)
	}
	switch {
	case t.object.Size() != t.size:
		return o, errs.Invalid("multicast.NewTeam", fmt.Sprintf("%s, where the object is of %s", errs.Bytes(t.size), errs.Bytes(t.object.Size())),
			"the granularity grows with the team: ask for a multiple of it")
	case by == vmm.Fabric:
		o.body, err = t.object.ExportFabric()
	case by == vmm.PosixFD:
		if o.file, err = t.object.Export(); err == nil {
			t.own("descriptor", o.file.Close) // in case the step returned too late to close it
		}
	}
	return o, err
}

func (t *Team) add() error {
	for _, d := range t.devices {
		if t.object.addedHere(d) {
			continue
		}
		if err := t.object.AddDevice(d); err != nil {
			return err
		}
	}
	return nil
}

func (t *Team) bind() error {
	for _, d := range t.devices[len(t.bindings):] {
		b, err := t.object.Bind(d, 0, t.replicas[len(t.bindings)].memory, 0, t.size)
		if err != nil {
			return err
		}
		t.own("binding", b.closeUnused)
		t.bindings = append(t.bindings, b)
	}
	return nil
}

func (t *Team) mapAll() error {
	return t.whole(func() (err error) {
		t.at, err = t.mapped(t.devices[0], t.object, t.devices)
		return err
	})
}
