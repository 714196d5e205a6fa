package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/term"
)

// onTerminal returns w if it is a terminal that can move its cursor, or else nil.
func (h host) onTerminal(w io.Writer) *os.File {
	f, ok := w.(*os.File)
	if name, _ := h.env("TERM"); !ok || name == "dumb" || !term.IsTerminal(int(f.Fd())) {
		return nil
	}
	return f
}

// colors reports whether to write in color: to a terminal, unless NO_COLOR is set.
func (h host) colors() bool {
	value, _ := h.env("NO_COLOR")
	return value == "" && h.screen != nil
}

// size returns the columns and rows to fill: those of the terminal, unless COLUMNS and
// LINES say otherwise. rows is 0 if there is no limit.
func (h host) size() (columns, rows int) {
	const usual = 100
	columns = usual
	if h.screen != nil {
		if c, r, err := term.GetSize(int(h.screen.Fd())); err == nil && c > 0 {
			columns, rows = c, r
		}
	}
	override := func(name string, to *int) {
		text, _ := h.env(name)
		if n, err := strconv.Atoi(text); err == nil && n > 0 {
			*to = n
		}
	}
	override("COLUMNS", &columns)
	override("LINES", &rows)
	return max(columns, 20), rows
}

// untilEnded returns a context that ends with an interrupt or a request to terminate.
func untilEnded() (context.Context, context.CancelFunc) {
	return signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
}

// Control sequences that switch to the terminal's alternate screen, without a cursor and
// without wrapping, and back.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l\x1b[?7l"
	leaveScreen = "\x1b[?7h\x1b[?25h\x1b[?1049l"
)

// repeat calls draw once, or every so often until ctx ends, which is no error. On a
// terminal it draws in place, and at once after a change of size.
func (h host) repeat(ctx context.Context, out io.Writer, every time.Duration, draw func(w io.Writer) error) (err error) {
	if every <= 0 {
		if err := draw(out); ctx.Err() == nil {
			return err
		}
		return nil
	}
	var resized <-chan os.Signal
	if h.screen != nil {
		var stop func()
		resized, stop = resizes()
		defer stop()
		if _, err := io.WriteString(out, enterScreen); err != nil {
			return err
		}
		defer func() {
			if _, leave := io.WriteString(out, leaveScreen); err == nil {
				err = leave
			}
		}()
	}
	for {
		var frame bytes.Buffer
		if err := draw(&frame); err != nil || ctx.Err() != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		text := frame.Bytes()
		if h.screen != nil {
			_, rows := h.size()
			text = inPlace(text, rows)
		}
		if _, err := out.Write(text); err != nil {
			return err
		}
		select {
		case <-time.After(every):
		case <-resized:
		case <-ctx.Done():
			return nil
		}
	}
}

// inPlace returns a text that overwrites a screen of that many rows. Clearing it first
// would flicker.
func inPlace(text []byte, rows int) []byte {
	lines := bytes.Split(bytes.TrimSuffix(text, []byte("\n")), []byte("\n"))
	if rows > 0 && len(lines) > rows {
		lines = append(lines[:rows-1:rows-1], []byte("…"))
	}
	return append([]byte("\x1b[H"), append(bytes.Join(lines, []byte("\x1b[K\r\n")), "\x1b[K\x1b[J"...)...)
}

// progress shows the step under way on a terminal, after a delay. A nil progress shows
// nothing.
type progress struct {
	to    io.Writer
	mu    sync.Mutex
	text  string
	timer *time.Timer
	shown bool
}

// step names the step that begins.
func (p *progress) step(format string, args ...any) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text = fmt.Sprintf(format, args...)
	switch {
	case p.shown:
		p.show()
	case p.timer == nil:
		p.timer = time.AfterFunc(400*time.Millisecond, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.text != "" {
				p.show()
			}
		})
	}
}

// show writes the text. The caller holds the lock.
func (p *progress) show() {
	p.shown = true
	_, _ = fmt.Fprintf(p.to, "\r\x1b[K%s ...", p.text) // the result does not depend on it
}

// end erases the step.
func (p *progress) end() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.timer != nil {
		p.timer.Stop()
	}
	if p.text = ""; p.shown {
		_, _ = io.WriteString(p.to, "\r\x1b[K")
	}
	p.timer, p.shown = nil, false
}

// output remembers the first error of a write, which most callers ignore.
type output struct {
	to  io.Writer
	err error
}

// Write implements io.Writer.
func (o *output) Write(b []byte) (int, error) {
	n, err := o.to.Write(b)
	if err != nil && o.err == nil {
		o.err = err
	}
	return n, err
}
