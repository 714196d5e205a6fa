package core

import (
	"strings"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// logRoom is what the driver's whole log takes at most, in bytes.
const logRoom = 25600

// SkipLog lets errors say only what the driver logs from now on.
func (s *System) SkipLog() {
	if s.Drv.Has(driver.CallLogsCurrent) {
		end, _ := s.Drv.LogsCurrent() // where that fails, the log is read from its beginning
		s.logged.Store(uint32(end))
	}
}

// logOf returns what the driver logged of a call that failed, or "". It reads the log only
// now, so calls that succeed pay nothing. The log is one for all threads of the process, and a
// goroutine may have left the thread that made the call, so the entry is found by the call's
// name: the latest since the last error. If two goroutines fail in one call at the same time,
// they may be given each other's.
func (s *System) logOf(c driver.Call, r driver.Result) string {
	if r <= driver.Success || r == driver.Deinitialized || r == driver.NotInitialized || !s.Drv.Has(driver.CallLogsDumpToMemory) {
		return ""
	}
	text := make([]byte, logRoom)
	end, n, r := s.Drv.LogsDumpToMemory(driver.LogPosition(s.logged.Load()), text)
	if r != driver.Success {
		return ""
	}
	s.logged.Store(uint32(end))
	return latestOf(c, string(text[:min(n, logRoom)]))
}

// latestOf returns the latest message of a call in a log, whose lines are "[time][thread]
// [source][severity][entry point] message".
func latestOf(c driver.Call, log string) (message string) {
	for line := range strings.Lines(log) {
		name := ""
		for strings.HasPrefix(line, "[") {
			field, rest, ok := strings.Cut(line[1:], "]")
			if !ok {
				break
			}
			name, line = field, rest
		}
		// The name may be that of a later form, as cuMemAlloc_v2.
		if name, _, _ = strings.Cut(name, "_"); name == c.Entry() {
			message = strings.TrimSpace(strings.Trim(line, "\x00"))
		}
	}
	return message
}
