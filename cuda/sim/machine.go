package sim

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/internal/bystander"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/ledger"
	"github.com/cuvmm/cuvmm/internal/osmem"
)

type driverHolder = driver.Holder

// Machine is a computer with software devices and a driver of its own, as one
// process sees it. Several machines in a process know nothing of each other,
// unless [Options.Folder] makes them one: then they are like processes on it.
// All methods are safe for concurrent use.
type Machine struct {
	driverHolder

	name    string
	options Options
	library api
	foreign api
	devices []*device
	host    *pool
	managed *pool          // the bytes of managed memory, which host and devices pay for
	books   *ledger.Ledger // of a machine that processes share; nil without a folder
	faults  faults

	// reaching is held over each call of a host function, before mu.
	reaching sync.Mutex

	// mu guards all that follows and everything reachable from it. Memory is
	// copied, and kernels run, outside of it.
	mu      sync.Mutex
	changed *sync.Cond // work was done, a stall ended, the machine was closed

	inited, closed bool
	process        process
	attendant      *attendant
	dismantled     bool // what calls that waited still hold is gone
	rng            *rand.Rand
	reports        []string // what went wrong, in words
	log            driverLog
	culprit        string // what first destroyed a context
	objects        map[*object]struct{}
	orphans        []*object
	freed          []span // addresses, latest last, if Options.ReuseAddresses
	touches        uint64 // of managed memory by devices
	pinnedSlabs    shelf
	managedSlabs   shelf
	stuck          []*backing // that the system would not take back
	races          []Race

	threads  map[int]*thread
	contexts map[driver.Context]*gpuContext
	streams  map[driver.Stream]*stream
	events   map[driver.Event]*event
	handles  map[driver.MemHandle]*handle
	shared   map[osmem.FileID]*memory
	teams    map[*team]struct{} // multicast objects
	bound    map[uint64]*memory // that was bound to those of this machine alone
	bounds   uint64             // how often memory was
	slots    int                // taken of the switches', without books
	held     []held             // memory files that others may still hold
	reserved intervals[*object] // reservations
	backing  intervals[*backing]
	former   intervals[former] // mappings that were
	unused   intervals[outOfUse]
	system   *backing          // the operating system's memory, where a device pages it
	leased   intervals[*lease] // addresses of captured allocations
	engine   engine
	captures map[uint64]*capture
	joined   map[*stream]struct{} // that take part in a capture
	beside   *capture             // another library's, if tests ask for one
	graphs   map[driver.Graph]*graph
	execs    map[driver.GraphExec]*graphExec
	modules  map[driver.Module]*module

	hostFuncs    map[driver.HostFunc]func()
	lastHostFunc driver.HostFunc
	functions    map[driver.Function]*function
}

// api is the driver's interface to a machine: in the library's form, whose
// calls run in the relaxed capture mode, or in the foreign form, whose calls
// run in the mode of the calling thread.
type api struct {
	m       *Machine
	foreign bool
}

var _ driver.Foreign = (*api)(nil)

var machines atomic.Int64

// New makes a machine. Close reports what was leaked on it.
func New(options Options) (*Machine, error) {
	options = options.withDefaults()
	if err := options.check(); err != nil {
		return nil, err
	}
	options.Races = options.Races || bystander.Races.Load()
	m := &Machine{
		name:      fmt.Sprintf("sim-%d", machines.Add(1)),
		options:   options.visible(),
		rng:       rand.New(rand.NewPCG(options.Seed, 0x63757666)),
		host:      newPool(uint64(options.HostMemory), true),
		objects:   map[*object]struct{}{},
		threads:   map[int]*thread{},
		contexts:  map[driver.Context]*gpuContext{},
		streams:   map[driver.Stream]*stream{},
		events:    map[driver.Event]*event{},
		handles:   map[driver.MemHandle]*handle{},
		shared:    map[osmem.FileID]*memory{},
		teams:     map[*team]struct{}{},
		bound:     map[uint64]*memory{},
		captures:  map[uint64]*capture{},
		joined:    map[*stream]struct{}{},
		graphs:    map[driver.Graph]*graph{},
		execs:     map[driver.GraphExec]*graphExec{},
		modules:   map[driver.Module]*module{},
		functions: map[driver.Function]*function{},
	}
	m.changed = sync.NewCond(&m.mu)
	m.engine.init()
	m.library = api{m, false}
	m.driverHolder = driver.NewHolder(&m.library)
	m.foreign = api{m, true}
	room := options.HostMemory
	for i, d := range m.options.Devices {
		m.devices = append(m.devices, newDevice(i, d))
		room += d.Memory
	}
	m.managed = newPool(uint64(room), true)
	m.newShelves()
	m.system = newSystemMemory(m)
	m.beginBeside()
	if options.Folder != "" {
		if err := m.join(options); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// Close stops the machine and frees its memory. Pending work is dropped; a
// kernel that runs is waited for, and ends at its next access to memory. If
// anything that was created on the machine is still there, the error lists it,
// with the stacks of its creation; objects of a context that was lost to an error
// count like any other. With [Options.Races] the error also lists the races. A second Close does nothing.
func (m *Machine) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	leaks := m.leaks()
	m.closed = true
	m.changed.Broadcast()
	m.stopEngine()
	m.dismantle()
	m.mu.Unlock()
	m.attendant.close()
	ended := errors.Join(m.besideEnded(), m.racesEnded())
	if len(leaks) == 0 {
		return ended
	}
	var b strings.Builder
	fmt.Fprintf(&b, "sim: machine %s was closed with %s; close each first:", m.name, errs.Count(len(leaks), "leaked object"))
	for _, l := range leaks {
		fmt.Fprintf(&b, "\n%v", l)
	}
	return errors.Join(ended, errors.New(b.String()))
}

// dismantle returns everything to the system.
func (m *Machine) dismantle() {
	m.dismantled = true
	for r := range m.backing.all() {
		err := r.v.dismantle()
		if r.v.mem != nil {
			r.v.mem.unmap()
		}
		if r.v.ownsAddresses() && err == nil {
			space.put(r.v.addresses())
		}
	}
	m.pinnedSlabs.close()
	m.managedSlabs.close()
	for r := range m.reserved.all() {
		space.put(span{r.lo, r.hi})
	}
	for l := range m.leased.all() {
		space.put(l.v.span)
	}
	for _, h := range m.handles {
		h.mem.unmap()
	}
	for _, h := range m.held {
		_ = h.file.Close()
		for _, mem := range h.pins {
			mem.unmap()
		}
	}
	for _, p := range m.pools() {
		if p.arena != nil {
			_ = p.arena.Close()
		}
	}
	if m.books != nil {
		_ = m.books.Close()
	}
}

// Memory returns how many bytes of a device's memory are free, and how many there are.
// It panics for a device that does not exist, and on a closed machine.
func (m *Machine) Memory(device int) (free, total int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case device < 0 || device >= len(m.devices):
		panic(fmt.Sprintf("sim: Memory of device %d: the machine has %d", device, len(m.devices)))
	case m.closed:
		panic(fmt.Sprintf("sim: Memory of device %d: machine %s was closed; ask before", device, m.name))
	}
	p := m.devices[device].pool
	return int(m.available(p)), int(p.limit)
}

// Fault describes what destroyed a context, the first if there were several: which
// operation touched which address, and why that was wrong. It returns "" if no context
// was destroyed.
func (m *Machine) Fault() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.culprit
}

func (m *Machine) pools() []*pool {
	all := []*pool{m.host, m.managed}
	for _, d := range m.devices {
		all = append(all, d.pool)
	}
	return all
}

// enter begins every call: it counts the call, fails or delays it as a test
// injected, and applies the rules that hold for all calls. On Success the machine
// is locked, until leave.
func (a *api) enter(c driver.Call) driver.Result {
	f, _ := a.inject(c)
	if f != driver.Success {
		return f
	}
	return a.lock(c)
}

// enterRun is enter for a call over several mappings, which a test may cut
// short.
func (a *api) enterRun(c driver.Call) (driver.Result, *cut) {
	f, cut := a.inject(c)
	if f != driver.Success && cut == nil {
		return f, nil
	}
	return a.lock(c), cut
}

// enterNamed is enter for a call that names a context, which it returns, lost or
// not; see resolve. An injected result that means a loss destroys the context
// before the call, which then fails as on any lost context.
func (a *api) enterNamed(call driver.Call, c driver.Context) (*gpuContext, driver.Result) {
	return a.enterToDestroy(call, c, func() *gpuContext { return nil })
}

// enterToDestroy is enterNamed for a call that destroys what a context owns. A thread
// without a current context may make it, too: then the owner is the context.
func (a *api) enterToDestroy(call driver.Call, c driver.Context, owner func() *gpuContext) (*gpuContext, driver.Result) {
	f, _ := a.inject(call)
	if f != driver.Success && (!f.Lost() || f == driver.Deinitialized) {
		return nil, f
	}
	if r := a.lock(call); r != driver.Success {
		return nil, r
	}
	ctx := a.m.resolve(c)
	if ctx == nil && c == 0 && a.m.thread().current == 0 {
		ctx = owner()
	}
	if ctx == nil {
		a.leave()
		return nil, driver.InvalidContext
	}
	if f != driver.Success {
		ctx.lose(fault{f, fmt.Sprintf("an injected fault: %v returned %v", call, f)})
	}
	return ctx, driver.Success
}

// inject counts a call and applies the fault that a test injected for it.
func (a *api) inject(c driver.Call) (driver.Result, *cut) {
	fault, cut := a.m.faults.count(c)
	if fault.Delay > 0 {
		time.Sleep(fault.Delay)
	}
	return driver.Result(fault.Result), cut
}

// lock applies the rules that hold for all calls, and locks the machine on
// Success.
func (a *api) lock(c driver.Call) driver.Result {
	m := a.m
	m.mu.Lock()
	for m.process.stopped() && !m.closed {
		m.changed.Wait()
	}
	var r driver.Result
	switch {
	case !a.Has(c):
		r = driver.MissingEntryPoint
	case m.closed:
		r = driver.Deinitialized
	case !m.inited && c != driver.CallInit && c != driver.CallDriverGetVersion:
		r = driver.NotInitialized
	default:
		m.settle(aFew)
		r = a.guardCaptures(c)
	}
	if r != driver.Success {
		m.mu.Unlock()
	}
	return r
}

func (a *api) leave() { a.m.mu.Unlock() }

func (a *api) Describe() driver.Description {
	return driver.Description{Software: true, Machine: a.m.name}
}

func (a *api) Has(c driver.Call) bool {
	return c >= 0 && int(c) < driver.CallCount && int(c.Version()) <= a.m.options.DriverVersion
}

func (a *api) Foreign() driver.Foreign { return &a.m.foreign }

func (a *api) Init() driver.Result {
	if r := a.enter(driver.CallInit); r != driver.Success {
		return r
	}
	defer a.leave()
	a.m.inited = true
	a.m.attend()
	return driver.Success
}

func (a *api) DriverGetVersion() (int32, driver.Result) {
	if r := a.enter(driver.CallDriverGetVersion); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	return int32(a.m.options.DriverVersion), driver.Success
}
