package sim

import (
	"fmt"
	"maps"
	"os"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// process is what the calls for checkpoints, which another process makes (attendant.go), have
// made of this one.
//
//	state         call        next, if it succeeds      if it fails
//	running       Lock        locked                    running: work did not end in time
//	locked        Checkpoint  checkpointed              locked: there is managed or multicast memory
//	locked        Unlock      running
//	checkpointed  Restore     locked                    failed: memory is imported, or none is free
//	failed
//
// From Lock until Unlock the process's own calls wait. In the last state its contexts are lost.
type process struct {
	state   driver.ProcessState
	locking bool // Lock waits for work
	// away is what the process had of each device's memory, by device.
	away map[*device]uint64
}

// stopped reports whether the process's own calls wait.
func (p *process) stopped() bool {
	return p.locking || p.state == driver.ProcessLocked || p.state == driver.ProcessCheckpointed
}

// lockProcess stops the process's calls, once its work is done, for which it waits so long; 0
// means without an end.
func (m *Machine) lockProcess(timeout time.Duration) driver.Result {
	if m.process.state != driver.ProcessRunning || m.process.locking {
		return driver.IllegalState
	}
	expired := false
	if timeout > 0 {
		defer time.AfterFunc(timeout, func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			expired = true
			m.changed.Broadcast()
		}).Stop()
	}
	m.process.locking = true
	defer func() {
		m.process.locking = false
		m.changed.Broadcast()
	}()
	for work := m.tails(); len(work) > 0; work = m.tails() {
		switch {
		case m.closed:
			return driver.Deinitialized
		case expired:
			m.explain(driver.CallCheckpointProcessLock, "process %d has work that did not end in %v", os.Getpid(), timeout)
			return driver.NotReady
		}
		m.want(work)
		m.changed.Wait()
		m.unwant(work)
	}
	m.process.state = driver.ProcessLocked
	return driver.Success
}

// tails are the last pieces of work on all streams that have any.
func (m *Machine) tails() (work []*op) {
	for _, c := range m.contexts {
		for s := range c.working {
			work = append(work, s.tail)
		}
	}
	return work
}

// checkpointProcess takes the process's memory off the devices. The bytes stay in this
// process, so what is left to do is to count.
func (m *Machine) checkpointProcess() driver.Result {
	if m.process.state != driver.ProcessLocked {
		return driver.IllegalState
	}
	memories := m.memories()
	for mem := range memories {
		if mem.pool == m.managed || mem.team != nil {
			m.explain(driver.CallCheckpointProcessCheckpoint, "process %d has managed memory or a multicast object", os.Getpid())
			return driver.NotSupported
		}
	}
	m.process.away = map[*device]uint64{}
	for mem := range memories {
		if d := m.deviceOf(mem.pool); d != nil && mem.shared != nil {
			m.process.away[d] += mem.size
			if err := mem.unshare(); err != nil {
				m.explain(driver.CallCheckpointProcessCheckpoint, "%v", err)
				return driver.OperatingSystem
			}
		}
	}
	for _, d := range m.devices {
		own := m.books.Own(d.pool.index)
		m.books.Release(d.pool.index, own)
		m.process.away[d] += own
	}
	m.process.state = driver.ProcessCheckpointed
	return driver.Success
}

// restoreProcess brings the memory back, or the process is lost.
func (m *Machine) restoreProcess() driver.Result {
	if m.process.state != driver.ProcessCheckpointed {
		return driver.IllegalState
	}
	for mem := range m.memories() {
		if mem.pool == nil {
			return m.failProcess(driver.NotSupported, "it has imported memory")
		}
	}
	for i, d := range m.devices {
		if n := m.process.away[d]; !m.books.Acquire(d.pool.index, n) {
			for _, before := range m.devices[:i] {
				m.books.Release(before.pool.index, m.process.away[before])
			}
			return m.failProcess(driver.OutOfMemory, fmt.Sprintf("device %d has no room for its %d bytes", d.ordinal, n))
		}
	}
	m.process.away = nil
	m.process.state = driver.ProcessLocked
	return driver.Success
}

func (m *Machine) failProcess(r driver.Result, why string) driver.Result {
	m.explain(driver.CallCheckpointProcessRestore, "process %d cannot be restored, and is lost: %s", os.Getpid(), why)
	for _, d := range m.devices {
		d.pool.lost = true
	}
	m.process.state = driver.ProcessFailed
	for _, c := range m.contexts {
		c.lose(fault{driver.LaunchFailed, "the process could not be restored from a checkpoint: " + why})
	}
	m.changed.Broadcast()
	return r
}

func (m *Machine) unlockProcess() driver.Result {
	if m.process.state != driver.ProcessLocked {
		return driver.IllegalState
	}
	m.process.state = driver.ProcessRunning
	m.changed.Broadcast()
	return driver.Success
}

// memories are all that the process holds.
func (m *Machine) memories() map[*memory]struct{} {
	all := map[*memory]struct{}{}
	for h := range maps.Values(m.handles) {
		all[h.mem] = struct{}{}
	}
	for r := range m.backing.all() {
		if r.v.mem != nil {
			all[r.v.mem] = struct{}{}
		}
	}
	return all
}

// deviceOf returns the device whose pool that is, or nil.
func (m *Machine) deviceOf(p *pool) *device {
	for _, d := range m.devices {
		if d.pool == p {
			return d
		}
	}
	return nil
}

// unshare gives exported memory bytes of its own again. What others have of it, by a
// descriptor or an import, stays theirs.
func (mem *memory) unshare() error {
	p := mem.pool
	if err := p.open(); err != nil {
		return err
	}
	file := mem.shared
	pieces := p.free.acquirePieces(mem.size)
	mem.machine.forgetShared(mem)
	from, id := file.Bytes(), mem.id
	mem.pieces, mem.shared, mem.id = pieces, nil, 0
	for b := range mem.runs(0, mem.size) {
		copyPages(b, from[:len(b)])
		from = from[len(b):]
	}
	err := file.Close()
	mem.machine.books.Drop(id)
	return err
}
