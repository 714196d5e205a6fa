package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// terminal is a pseudo-terminal in which this test's program runs.
type terminal struct {
	keyboard *os.File
	program  *exec.Cmd

	mu    sync.Mutex
	shown bytes.Buffer
	ended chan struct{}
}

// inTerminal starts the program in a terminal of a size.
func inTerminal(t *testing.T, columns, rows uint16, env []string, args ...string) *terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		needs.Lacks(t, "pseudo-terminals: %v", err)
	}
	require.NoError(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	slave, err := os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|syscall.O_NOCTTY, 0)
	require.NoError(t, err)
	x := &terminal{keyboard: master, ended: make(chan struct{})}
	x.resize(t, columns, rows)
	self, err := os.Executable()
	require.NoError(t, err)
	x.program = exec.CommandContext(t.Context(), self, args...)
	x.program.Env = append(append(os.Environ(), asChild+"=1", "TERM=xterm", "COLUMNS=", "LINES=", "NO_COLOR="), env...)
	x.program.Stdin, x.program.Stdout, x.program.Stderr = slave, slave, slave
	x.program.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	require.NoError(t, x.program.Start())
	require.NoError(t, slave.Close())
	go func() {
		defer close(x.ended)
		for b := make([]byte, 4096); ; {
			n, err := master.Read(b)
			x.mu.Lock()
			x.shown.Write(b[:n])
			x.mu.Unlock()
			if err != nil {
				return // the program has ended
			}
		}
	}()
	t.Cleanup(func() { require.NoError(t, master.Close()) })
	return x
}

func (x *terminal) resize(t *testing.T, columns, rows uint16) {
	t.Helper()
	require.NoError(t, unix.IoctlSetWinsize(int(x.keyboard.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: columns, Row: rows}))
}

func (x *terminal) text() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.shown.String()
}

// wait returns the exit code, and all that was shown.
func (x *terminal) wait(t *testing.T) (code int, text string) {
	t.Helper()
	_ = x.program.Wait() // the code tells
	<-x.ended
	return x.program.ProcessState.ExitCode(), x.text()
}

func TestAMapIsAsWideAsTheTerminal(t *testing.T) {
	program(t)
	for _, c := range []struct {
		columns uint16
		env     []string
		args    []string
		want    int
	}{
		{70, nil, []string{"map"}, 66},
		{133, nil, []string{"map"}, 129},
		{133, []string{"COLUMNS=90"}, []string{"map"}, 86},
		{133, []string{"COLUMNS=90"}, []string{"map", "-width", "50"}, 50},
		{5, nil, []string{"map"}, 16},
	} {
		code, text := inTerminal(t, c.columns, 50, c.env, c.args...).wait(t)
		require.Equal(t, exitOK, code, text)
		require.Equal(t, c.want, widest(text))
		require.Contains(t, text, "\x1b[34m", "in color")
	}
	for _, env := range []string{"NO_COLOR=1", "TERM=dumb"} {
		_, text := inTerminal(t, 80, 50, []string{env}, "map").wait(t)
		require.NotContains(t, text, "\x1b", env)
		require.Positive(t, widest(text))
	}
}

// A map that is drawn again and again has the screen to itself, follows its size at once,
// and gives it back whatever ends the program.
func TestALiveMapGivesTheTerminalBack(t *testing.T) {
	program(t)
	for name, end := range map[string]func(x *terminal) error{
		"Ctrl-C":    func(x *terminal) error { _, err := x.keyboard.Write([]byte{3}); return err },
		"a signal":  func(x *terminal) error { return x.program.Process.Signal(syscall.SIGTERM) },
		"no map":    nil,
		"top, too":  func(x *terminal) error { _, err := x.keyboard.Write([]byte{3}); return err },
		"plain top": func(x *terminal) error { _, err := x.keyboard.Write([]byte{3}); return err },
	} {
		t.Run(name, func(t *testing.T) {
			args, env, own := []string{"map", "-every", "1h"}, []string(nil), true
			switch name {
			case "no map":
				args = []string{"map", "-every", "1h", "/nowhere"}
			case "top, too":
				args = []string{"top", "-every", "1h"}
			case "plain top":
				args, env, own = []string{"top", "-every", "1h"}, []string{"TERM=dumb"}, false
			}
			x := inTerminal(t, 100, 24, env, args...)
			if end != nil {
				require.Eventually(t, func() bool { return strings.Contains(x.text(), "MiB") }, time.Minute, time.Millisecond)
				if args[0] == "map" {
					require.LessOrEqual(t, strings.Count(x.text(), "\n"), 24, "the rest has no room")
					x.resize(t, 60, 24)
					require.Eventually(t, func() bool {
						frames := strings.Split(x.text(), "\x1b[H")
						return len(frames) > 2 && widest(frames[len(frames)-1]) == 56
					}, time.Minute, time.Millisecond)
				}
				require.NoError(t, end(x))
			}
			code, text := x.wait(t)
			require.Equal(t, own, strings.Contains(text, enterScreen))
			if own {
				require.Equal(t, 1, strings.Count(text, leaveScreen))
				require.Less(t, strings.LastIndex(text, "MiB"), strings.Index(text, leaveScreen))
			}
			if end == nil {
				require.Equal(t, exitFailed, code)
				_, after, left := strings.Cut(text, leaveScreen)
				require.True(t, left)
				require.Contains(t, after, "no such file", "the error is on the screen that stays")
				return
			}
			require.Equal(t, exitOK, code, "%q", text)
		})
	}
}

// A long step is shown on a terminal, and erased at its end.
func TestProgress(t *testing.T) {
	dir := t.TempDir()
	program(t)
	pipe := dir + "/snapshot"
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	x := inTerminal(t, 100, 24, nil, "map", pipe)
	require.Eventually(t, func() bool { return strings.Contains(x.text(), "taking a snapshot ...") }, time.Minute, time.Millisecond)
	saved, _ := cuvmm(t, exitOK, "map", "-json")
	f, err := os.OpenFile(pipe, os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = io.WriteString(f, saved)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	code, text := x.wait(t)
	require.Equal(t, exitOK, code)
	require.Contains(t, text, "taking a snapshot ...\r\x1b[K")

	var quiet *progress
	quiet.step("nothing")
	quiet.end()
}

// Output that cannot be written is an error.
func TestOutputThatCannotBeWritten(t *testing.T) {
	program(t)
	self, err := os.Executable()
	require.NoError(t, err)
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		needs.Lacks(t, "/dev/full: %v", err)
	}
	defer full.Close()
	for _, args := range [][]string{{"map"}, {"map", "-json"}, {"top"}, {"doctor", "-driver", "sim"}, {"info", "-driver", "sim"}, {"help"}} {
		c := exec.CommandContext(t.Context(), self, args...)
		var complaints bytes.Buffer
		c.Env, c.Stdout, c.Stderr = append(os.Environ(), asChild+"=1"), full, &complaints
		require.Error(t, c.Run(), args)
		require.Equal(t, exitFailed, c.ProcessState.ExitCode(), fmt.Sprint(args, complaints.String()))
		require.Contains(t, complaints.String(), "no space left on device")
	}
}
