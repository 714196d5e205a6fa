package sim

import (
	"fmt"

	"github.com/cuvmm/cuvmm/internal/bystander"
	"github.com/cuvmm/cuvmm/internal/driver"
)

// noThread is a number that no thread has.
const noThread = -1

// beginBeside begins the capture of a bystander, if tests request one. It is the easiest
// to end: in global mode, and of a stream in each context that waits for the legacy
// stream. No call comes from the thread that began it.
func (m *Machine) beginBeside() {
	if !bystander.Captures.Load() {
		return
	}
	m.beside = &capture{m: m, id: lastCapture.Add(1), mode: driver.CaptureGlobal, thread: noThread}
	m.captures[m.beside.id] = m.beside
}

// joinBeside has a stream of a new context take part in the bystander's capture.
func (m *Machine) joinBeside(c *gpuContext) {
	if m.beside == nil {
		return
	}
	s := &stream{m: m, context: c, id: lastStreamID.Add(1)}
	s.join(&joined{capture: m.beside})
}

// besideEnded returns an error if a call ended the bystander's capture.
func (m *Machine) besideEnded() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.beside == nil || !m.beside.invalidated {
		return nil
	}
	return fmt.Errorf("sim: a call ended another library's capture on machine %s; let it run in the relaxed capture mode, and wait for no blocking stream:\n%v", m.name, m.beside.by)
}
