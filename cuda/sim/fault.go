package sim

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// Fault makes driver calls fail, or take time. The order is: skip After calls,
// then apply to Times calls.
type Fault struct {
	// Call is the entry point's name, as in Calls; "" means every call.
	Call string
	// After is how many calls pass before the fault applies.
	After int
	// Times is how many calls the fault applies to: 0 means one, a negative
	// number all that follow.
	Times int
	// Result is what the call returns, a CUresult: 2 is out of memory. The call
	// then has no effect. A result that means a lost context, as 700, destroys the
	// context that the call names, and the call then fails as on any lost one. 0 lets
	// the call proceed after the Delay.
	Result cuda.Code
	// Delay is how long the call takes.
	Delay time.Duration
	// Parts, if positive, lets a call over several mappings (cuMemSetAccess,
	// cuMemUnmap) do its work on so many of them, less one, before it returns
	// Result: 1 fails after none, 3 after two. If there are fewer, the call
	// does all its work and then returns Result.
	Parts int
}

// faults counts the calls and holds the faults that wait for them.
type faults struct {
	mu       sync.Mutex
	counts   [driver.CallCount]int
	pending  []*pendingFault
	observer func(call string)
}

type pendingFault struct {
	Fault
	call        driver.Call // ignored if every call is meant
	skip, times int
}

// cut is what an injected fault does to a call over several mappings: it lets
// it come so far, and then returns result.
type cut struct {
	after  int
	result driver.Result
}

// count counts a call and returns the fault that applies to it.
func (f *faults) count(c driver.Call) (fault Fault, stop *cut) {
	f.mu.Lock()
	f.counts[c]++
	for i, p := range f.pending {
		if p.Call != "" && p.call != c {
			continue
		}
		if p.skip > 0 {
			p.skip--
			continue
		}
		fault = p.Fault
		if p.times > 0 {
			if p.times--; p.times == 0 {
				f.pending = slices.Delete(f.pending, i, i+1)
			}
		}
		break
	}
	observer := f.observer
	f.mu.Unlock()
	if observer != nil {
		observer(c.String())
	}
	if fault.Result != 0 && fault.Parts > 0 {
		stop = &cut{fault.Parts - 1, driver.Result(fault.Result)}
	}
	return fault, stop
}

// wrong describes why a fault cannot do what it says, or does nothing, or returns "". A
// test that injects such a fault would pass for that reason alone.
func (f Fault) wrong() string {
	_, known := driver.CallByName(f.Call)
	switch {
	case f.Call != "" && !known:
		return fmt.Sprintf("there is no driver call %q; sim.Calls lists them", f.Call)
	case f.After < 0 || f.Delay < 0 || f.Parts < 0:
		return fmt.Sprintf("After %d, Delay %v, Parts %d; none of them is negative", f.After, f.Delay, f.Parts)
	case f.Parts > 0 && f.Call != driver.CallMemSetAccess.String() && f.Call != driver.CallMemUnmap.String():
		return fmt.Sprintf("Parts is for %v and %v, not for %q", driver.CallMemSetAccess, driver.CallMemUnmap, f.Call)
	case f.Result == 0 && f.Parts > 0:
		return "Parts without a Result cuts nothing short; say what the call returns"
	case f.Result == 0 && f.Delay == 0:
		return "a fault without a Result and without a Delay does nothing; say what the call returns"
	}
	return ""
}

// Inject adds a fault. Of several that apply to a call the first that was
// added does; each skips calls on its own account. One that names no driver call,
// or could do nothing, panics. The returned function removes the fault.
func (m *Machine) Inject(f Fault) (remove func()) {
	if wrong := f.wrong(); wrong != "" {
		panic("sim: Inject: " + wrong)
	}
	p := &pendingFault{Fault: f, skip: f.After, times: f.Times}
	if f.Times == 0 {
		p.times = 1
	}
	if f.Call != "" {
		p.call, _ = driver.CallByName(f.Call)
	}
	m.faults.mu.Lock()
	defer m.faults.mu.Unlock()
	m.faults.pending = append(m.faults.pending, p)
	return func() {
		m.faults.mu.Lock()
		defer m.faults.mu.Unlock()
		m.faults.pending = slices.DeleteFunc(m.faults.pending, func(q *pendingFault) bool { return q == p })
	}
}

// ClearFaults removes all faults.
func (m *Machine) ClearFaults() {
	m.faults.mu.Lock()
	defer m.faults.mu.Unlock()
	m.faults.pending = nil
}

// OnCall has f called at the beginning of every driver call, with the entry
// point's name, from whatever goroutine made it. f may call the driver's other
// entry points, but sees those calls too. nil ends it.
func (m *Machine) OnCall(f func(call string)) {
	m.faults.mu.Lock()
	defer m.faults.mu.Unlock()
	m.faults.observer = f
}

// Count is how often a driver call was made, failed ones included.
func (m *Machine) Count(call string) int {
	c, ok := driver.CallByName(call)
	if !ok {
		panic(fmt.Sprintf("sim: Count: there is no driver call %q; sim.Calls lists them", call))
	}
	m.faults.mu.Lock()
	defer m.faults.mu.Unlock()
	return m.faults.counts[c]
}

// Counts returns how often each driver call was made, failed ones included. Calls that
// were never made are not in it.
func (m *Machine) Counts() map[string]int {
	m.faults.mu.Lock()
	defer m.faults.mu.Unlock()
	counts := map[string]int{}
	for c, n := range m.faults.counts {
		if n > 0 {
			counts[driver.Call(c).String()] = n
		}
	}
	return counts
}

// ResetCounts starts counting anew.
func (m *Machine) ResetCounts() {
	m.faults.mu.Lock()
	defer m.faults.mu.Unlock()
	m.faults.counts = [driver.CallCount]int{}
}

// Calls lists the driver calls by name: "cuMemCreate".
func Calls() []string {
	names := make([]string, driver.CallCount)
	for c := range names {
		names[c] = driver.Call(c).String()
	}
	return names
}
