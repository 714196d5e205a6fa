package diagnose

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/imex"
	"github.com/cuvmm/cuvmm/internal/nvml"
)

// Options select what Run looks at. The zero value works.
type Options struct {
	// Paths of the files that describe the channels. If all are empty, a driver that
	// simulates a machine describes its own channels.
	Paths imex.Paths
	// Trial creates one granule of memory with a fabric handle on each device, exports
	// and imports it.
	Trial bool
	// Recent accepts results of NVML from the last seconds: opening NVML is expensive.
	Recent bool
}

// recent is how old a result of NVML may be to explain an error.
const recent = 10 * time.Second

// Report is the result of Run.
type Report struct {
	Channels imex.Facts
	Devices  []Device
	Findings []Finding
}

// Run checks the machine and the devices. It makes no driver call that blocks, and
// creates no memory unless Options.Trial is set. It waits for NVML up to a limit.
func Run(sys *core.System, devices []driver.Device, o Options) Report {
	r := Report{Channels: channels(sys.Drv, o.Paths)}
	r.Findings = machine(r.Channels)
	for _, id := range devices {
		d := inspect(sys, id, o.Recent)
		r.Devices = append(r.Devices, d)
		r.Findings = append(r.Findings, device(d)...)
		if o.Trial {
			r.Findings = append(r.Findings, trial(sys, id, d)...)
		}
	}
	r.Findings = append(r.Findings, among(r.Devices)...)
	return r
}

// Creation returns why memory with a fabric handle could not be created, or nil if
// the findings cannot explain the driver's result.
func Creation(sys *core.System, prop driver.AllocationProp, r driver.Result) error {
	if prop.RequestedHandleTypes&driver.HandleFabric == 0 || !explained(r) {
		return nil
	}
	return &Error{Findings: Run(sys, core.DevicesOf(prop.Location), Options{Recent: true}).Findings}
}

// Import returns what this process knows about a fabric handle that the driver
// refused with r to import for a device: the process's own place on the fabric, and the
// findings if they may explain the result. It returns nil if neither helps.
func Import(sys *core.System, id driver.Device, r driver.Result) error {
	if !explained(r) && r != driver.InvalidHandle && r != driver.InvalidDevice {
		return nil
	}
	report := Run(sys, []driver.Device{id}, Options{Recent: true})
	e := &Error{Here: place(report)}
	if explained(r) {
		e.Findings = report.Findings
	}
	return e
}

// place describes a process's place on the fabric, to compare it with others.
func place(r Report) string {
	on := "no open channel"
	if open := r.Channels.Accessible(); len(open) > 0 {
		on = fmt.Sprintf("channel %d", open[0].Minor)
	}
	d := r.Devices[0]
	if d.FabricErr != nil || d.Fabric.State != nvml.StateCompleted || d.Fabric.Status != nvml.Success {
		return "this process has " + on + ", and its device is in no clique that is known"
	}
	return fmt.Sprintf("this process has %s, and its device is in clique %s", on, Clique(d.Fabric))
}

func channels(d driver.Driver, p imex.Paths) imex.Facts {
	if own, ok := d.(imex.Source); ok && p == (imex.Paths{}) {
		return own.IMEX()
	}
	return imex.Read(p)
}

var errNoUUID = errors.New("the driver does not report the GPU's UUID")

func inspect(sys *core.System, id driver.Device, late bool) Device {
	type key struct{ nvmlOf driver.Device }
	age := time.Duration(0)
	if late {
		age = recent
	}
	return sys.Cached(key{id}, age, func() any { return query(sys, id) }).(Device)
}

func query(sys *core.System, id driver.Device) Device {
	d := Device{Ordinal: int(id), Attribute: sys.Attribute(id, driver.AttrHandleFabric) > 0, FabricErr: nvml.ErrMissing}
	uuid, r := sys.Drv.DeviceGetUUID(id)
	if r != driver.Success {
		d.FabricErr = fmt.Errorf("%w: %v", errNoUUID, r)
		return d
	}
	d.UUID = fmt.Sprintf("GPU-%x-%x-%x-%x-%x", uuid[0:4], uuid[4:6], uuid[6:8], uuid[8:10], uuid[10:16])
	if own, ok := sys.Drv.(nvml.Source); ok {
		d.Fabric, d.FabricErr = within(nvmlTimeout, question{sys, d.UUID}, func() (nvml.Fabric, error) { return own.NVML().Fabric(d.UUID) })
	}
	return d
}

// nvmlTimeout is how long Run waits for NVML, whose calls have no limit of their own and
// may hang on a faulty GPU.
var nvmlTimeout = 10 * time.Second

var errSilent = errors.New("NVML did not return")

// question identifies a call of NVML, and asked are the calls in flight: a call that
// hangs occupies a thread, so there is at most one per question.
type question struct {
	of   *core.System
	uuid string
}

var asked sync.Map // of *reply, by question

type reply struct {
	began  time.Time
	done   chan struct{}
	fabric nvml.Fabric
	err    error
}

// within makes a call, or joins the one in flight, and abandons it once it has taken
// longer than the limit.
func within(limit time.Duration, q question, call func() (nvml.Fabric, error)) (nvml.Fabric, error) {
	found, waits := asked.LoadOrStore(q, &reply{began: time.Now(), done: make(chan struct{})})
	r := found.(*reply)
	if !waits {
		go func() {
			defer close(r.done)
			defer asked.Delete(q)
			r.fabric, r.err = call()
		}()
	}
	t := time.NewTimer(limit - time.Since(r.began))
	defer t.Stop()
	select {
	case <-r.done:
		return r.fabric, r.err
	case <-t.C:
		return nvml.Fabric{}, fmt.Errorf("%w within %v", errSilent, limit)
	}
}
