package app

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"
)

// Again returns a command that runs this sample again, as another process in the
// given role, with the same driver. It writes to e.Out and standard error. When
// ctx ends the process is interrupted, and killed if that does not end it. Its own context
// ends, too, when this process does, however that ends: its standard input is a pipe of
// this process, to which nothing is written.
func (e *Env) Again(ctx context.Context, role string, args ...string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, append([]string{"-as", role, "-driver", e.driver}, args...)...)
	cmd.Stdout, cmd.Stderr = e.Out, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 20 * time.Second
	if _, err := cmd.StdinPipe(); err != nil {
		return nil, err
	}
	return cmd, nil
}

// untilOrphaned returns a context that ends when the process ends that started this one by
// Again.
func untilOrphaned(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel(errors.New("the process that started this one has ended"))
	}()
	return ctx
}

// started reports whether Again started this process.
func started() bool { return len(os.Args) > 1 && os.Args[1] == "-as" }

// writer writes for several goroutines and remembers the first error: of a write
// that failed a child process learns no more than that a pipe is broken.
type writer struct {
	mu  sync.Mutex
	out io.Writer
	err error
}

func (w *writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n, err := w.out.Write(p)
	w.err = cmp.Or(w.err, err)
	return n, err
}

func (w *writer) failed() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}
