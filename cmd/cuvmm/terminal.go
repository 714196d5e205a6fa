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

// untilEnded returns a context that ends when the user or the system ends the program.
func untilEnded() (context.Context, context.CancelFunc) {
	return signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
}

// What switches a terminal to a screen of its own without a cursor or wrapped lines, and
// back to what it showed before.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l\x1b[?7l"
	leaveScreen = "\x1b[?7h\x1b[?25h\x1b[?1049l"
)

// repeat writes what draw writes, once or again and again: on a terminal in place, and at
// once if its size changes. It ends without an error when ctx does.
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

// inPlace returns a text that replaces what a screen of so many rows shows, without
// clearing it first, which would flicker.
func inPlace(text []byte, rows int) []byte {
	lines := bytes.Split(bytes.TrimSuffix(text, []byte("\n")), []byte("\n"))
	if rows > 0 && len(lines) > rows {
		lines = append(lines[:rows-1:rows-1], []byte("…"))
	}
	return append([]byte("\x1b[H"), append(bytes.Join(lines, []byte("\x1b[K\r\n")), "\x1b[K\x1b[J"...)...)
}

// progress shows on a terminal what a long command is at, once that has taken a while.
// A nil progress shows nothing.
type progress struct {
	to    io.Writer
	mu    sync.Mutex
	text  string
	timer *time.Timer
	shown bool
}

// step says what begins.
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
	_, _ = fmt.Fprintf(p.to, "\r\x1b[K%s ...", p.text) // it is a help alone
}

// end takes away what is shown.
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

// output remembers the first error, so that what was not written is not taken for
// success.
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
