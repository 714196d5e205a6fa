package sim

import "github.com/cuvmm/cuvmm/internal/driver"

// NewHostFunc makes no call of the driver, so it works on a closed machine, too.
func (a *api) NewHostFunc(reached func()) driver.HostFunc {
	m := a.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.hostFuncs == nil {
		m.hostFuncs = map[driver.HostFunc]func(){}
	}
	m.lastHostFunc++
	m.hostFuncs[m.lastHostFunc] = reached
	return m.lastHostFunc
}

// ReleaseHostFunc waits for a call that is in progress, as one may be whose context was
// lost meanwhile.
func (a *api) ReleaseHostFunc(f driver.HostFunc, released func()) {
	a.m.reaching.Lock()
	a.m.mu.Lock()
	delete(a.m.hostFuncs, f)
	a.m.mu.Unlock()
	a.m.reaching.Unlock()
	released()
}

// LaunchHostFunc puts a call of the function on the stream, or into the capture that
// the stream is part of. A function that was released meanwhile is not called.
func (a *api) LaunchHostFunc(c driver.Context, h driver.Stream, f driver.HostFunc) driver.Result {
	m := a.m
	return a.CallInOrder(c, h, func() {
		m.reaching.Lock()
		defer m.reaching.Unlock()
		m.mu.Lock()
		reached := m.hostFuncs[f]
		m.mu.Unlock()
		if reached != nil {
			reached()
		}
	})
}

// CallInOrder runs f without the machine's lock, on a goroutine of its own, since f
// may be a function of a program in another language and take its time. It may also tell
// the program what is done, and wait for what the program does.
func (a *api) CallInOrder(c driver.Context, h driver.Stream, f func()) driver.Result {
	s, r := a.enterStream(driver.CallLaunchHostFunc, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	_, r = s.submit(task{long: true, run: func(at site) *fault {
		at.release()
		f()
		at.acquire()
		return nil
	}})
	return r
}
