package sim

import (
	"fmt"
	"strings"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/host"
)

// Log returns what result codes cannot express: why a descriptor was refused, which
// address of a copy has no memory, what destroyed a context.
func (m *Machine) Log() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]string(nil), m.reports...)
}

// note adds to the log, which keeps its first thousand entries.
func (m *Machine) note(format string, args ...any) {
	if len(m.reports) < 1000 {
		m.reports = append(m.reports, fmt.Sprintf(format, args...))
	}
}

// explain is note for what failed a call. The driver's log has it, too, where the library
// looks for it.
func (m *Machine) explain(c driver.Call, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	m.note("%s", text)
	m.log.add(c, text)
}

// driverLog is what cuLogsDumpToMemory returns: the latest entries, in the vendor's form.
type driverLog struct {
	lines []string
	end   driver.LogPosition // how many there ever were
}

// mostLogged is how many entries the vendor's log keeps.
const mostLogged = 100

func (l *driverLog) add(c driver.Call, text string) {
	l.lines = append(l.lines, fmt.Sprintf("[%s][%d][CUDA][E][%s] %s\n",
		time.Now().Format("15:04:05.000"), host.ThreadID(), c.Entry(), strings.ReplaceAll(text, "\n", " ")))
	l.lines = l.lines[max(0, len(l.lines)-mostLogged):]
	l.end++
}

// from returns the entries from a position on, as far as they are kept.
func (l *driverLog) from(p driver.LogPosition) []string {
	return l.lines[len(l.lines)-min(len(l.lines), int(max(p, l.end)-p)):]
}

// The calls for the log are made because another call failed, so faults that a test meant
// for others do not count them.

func (a *api) LogsCurrent() (driver.LogPosition, driver.Result) {
	if r := a.lock(driver.CallLogsCurrent); r != driver.Success {
		return 0, r
	}
	defer a.leave()
	return a.m.log.end, driver.Success
}

func (a *api) LogsDumpToMemory(from driver.LogPosition, text []byte) (driver.LogPosition, uint64, driver.Result) {
	if r := a.lock(driver.CallLogsDumpToMemory); r != driver.Success {
		return 0, 0, r
	}
	defer a.leave()
	if len(text) == 0 {
		return 0, 0, driver.InvalidValue
	}
	lines := a.m.log.from(from)
	room := len(text) - 1 // for the NUL
	for n := len(strings.Join(lines, "")); n > room; lines = lines[1:] {
		n -= len(lines[0])
	}
	n := copy(text, strings.Join(lines, ""))
	text[n] = 0
	return a.m.log.end, uint64(n), driver.Success
}
