// Package reexec runs functions of a test in processes of their own, by
// executing the test binary again.
//
// CUDA does not survive a fork, and Go has none, so a test of several processes
// starts its own binary. A function is registered under a name from an init
// function of the test's package:
//
//	func init() {
//		reexec.Register("importer", func(c *reexec.Child) error { ... })
//	}
//
// and a test runs it:
//
//	child := reexec.Command(t, "importer", "an argument")
//	child.ExtraFiles = []*os.File{shared}
//	child.Start()
//	child.Send(size)
//	child.Recv(&result)
//	child.Wait()
//
// In the child, Register does not return for the requested name: it
// runs the function and exits. So no TestMain and no test runs in
// a child, and neither do init functions of the package that come later in file order.
//
// A child never outlives its test: it is killed at the end of the test or of its
// time, and exits by itself if the test's process is gone.
package reexec

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/test/testlog"
)

// childFlag is the child's first argument. The testing package does not know
// it, so a child whose name was not registered in time fails at once instead of
// running the tests.
const childFlag = "-reexec.child="

// DefaultTimeout is the default of Cmd.Timeout.
const DefaultTimeout = 5 * time.Minute

// grace is how much longer than its time a child waits to be killed before
// it exits by itself.
const grace = 5 * time.Second

var registered []string

// Register names a function that tests can run in a process of its own. It is
// called from init functions only, and panics on a name that is taken.
//
// In such a process it runs f and exits: with 0 where f returns nil, else with
// 1 and the error on standard error.
func Register(name string, f func(c *Child) error) {
	if slices.Contains(registered, name) {
		panic(fmt.Sprintf("reexec: %q is registered twice", name))
	}
	registered = append(registered, name)
	if len(os.Args) < 3 || os.Args[1] != childFlag+name {
		return
	}
	done := make(chan int)
	// A goroutine of its own, since the main one is locked to its thread
	// during initialisation.
	go func() { done <- runChild(f) }()
	os.Exit(<-done)
}

func runChild(f func(c *Child) error) int {
	c, err := newChild(os.Args[2], os.Args[3:])
	if err == nil {
		err = f(c)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// Child is the child's side of a Cmd.
type Child struct {
	// Args are the arguments that Command was given.
	Args []string
	// Files are the Cmd's ExtraFiles, in order. They belong to the function.
	Files []*os.File

	messages
}

// setup is the first message to a child.
type setup struct {
	Files int
}

func newChild(timeout string, args []string) (*Child, error) {
	limit, err := time.ParseDuration(timeout)
	if err != nil {
		return nil, fmt.Errorf("reexec: %w", err)
	}
	time.AfterFunc(limit+grace, func() {
		fmt.Fprintf(os.Stderr, "reexec: still running after %v\n", limit+grace)
		os.Exit(1)
	})
	c := &Child{Args: args, messages: newMessages(os.Stdin, os.Stdout)}
	// The function's output goes to the test's log, not between messages.
	os.Stdout = os.Stderr
	var s setup
	if err := c.Recv(&s); err != nil {
		return nil, err
	}
	for i := range s.Files {
		c.Files = append(c.Files, os.NewFile(uintptr(3+i), fmt.Sprintf("inherited %d", i)))
	}
	return c, nil
}

// Cmd is a child from the test's side. ExtraFiles, Env, Dir and SysProcAttr may
// be set before Start; Stdin, Stdout and Stderr are taken.
//
// If a method fails it ends the test with the child's standard error, so it belongs on
// the test's goroutine. Only Kill may be called on another.
type Cmd struct {
	*exec.Cmd
	// Timeout bounds the child's life; 0 is DefaultTimeout.
	Timeout time.Duration

	t      testing.TB
	name   string
	cancel context.CancelFunc
	log    testlog.Log
	wait   func() error
	messages
}

// Command prepares a child that runs the function registered under name. It
// ends the test if there is none.
func Command(t testing.TB, name string, args ...string) *Cmd {
	t.Helper()
	if !slices.Contains(registered, name) {
		t.Fatalf("reexec: no function %q: register it from an init function (registered: %q)", name, registered)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatalf("reexec: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	c := &Cmd{t: t, name: name, cancel: cancel}
	c.Cmd = exec.CommandContext(ctx, self, append([]string{childFlag + name, ""}, args...)...)
	c.Stderr = &c.log
	// A grandchild may hold standard error open.
	c.WaitDelay = time.Second
	return c
}

// Start starts the child.
func (c *Cmd) Start() {
	c.t.Helper()
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	c.Args[2] = c.Timeout.String()
	// The race detector delays the end of every process by a second, for reports in
	// progress: over a hundred children that is minutes.
	c.Env = append(c.Environ(), strings.TrimSpace("GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=20"))
	in, err := c.StdinPipe()
	if err != nil {
		c.t.Fatalf("reexec: %v", err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		c.t.Fatalf("reexec: %v", err)
	}
	c.messages = newMessages(out, in)
	if err := c.Cmd.Start(); err != nil {
		c.cancel()
		c.t.Fatalf("reexec: child %q: %v", c.name, err)
	}
	timer := time.AfterFunc(c.Timeout, func() {
		fmt.Fprintf(&c.log, "reexec: killed after its %v\n", c.Timeout)
		c.cancel()
	})
	c.wait = sync.OnceValue(func() error {
		err := c.Cmd.Wait()
		timer.Stop()
		c.cancel()
		return err
	})
	c.t.Cleanup(func() {
		c.cancel()
		_ = c.wait()
	})
	c.Send(setup{Files: len(c.ExtraFiles)})
}

// Send gives the child one message: any value that JSON holds.
func (c *Cmd) Send(v any) {
	c.t.Helper()
	if err := c.messages.Send(v); err != nil {
		c.fail("send", err)
	}
}

// Recv waits for the child's next message and stores it where v points.
func (c *Cmd) Recv(v any) {
	c.t.Helper()
	if err := c.messages.Recv(v); err != nil {
		c.fail("receive", err)
	}
}

// Wait closes the child's input and waits for its success.
func (c *Cmd) Wait() {
	c.t.Helper()
	if err := c.Exit(); err != nil {
		c.fail("wait", err)
	}
}

// Exit closes the child's input, waits for its end and returns it: an
// *exec.ExitError if the child failed or crashed.
func (c *Cmd) Exit() error {
	_ = c.messages.out.Close()
	return c.wait()
}

// Kill ends the child at once, as a crash would, and waits for its end.
func (c *Cmd) Kill() {
	_ = c.Process.Kill()
	_ = c.wait()
}

// Log returns the child's standard error and standard output, complete after the
// child's end.
func (c *Cmd) Log() string { return c.log.String() }

func (c *Cmd) fail(what string, err error) {
	c.t.Helper()
	c.cancel()
	if e := c.wait(); e != nil {
		err = fmt.Errorf("%w (%w)", err, e)
	}
	c.t.Fatalf("reexec: child %q: %s: %v\n%s", c.name, what, err, strings.TrimRight(c.Log(), "\n"))
}

// messages are JSON values on a pair of pipes.
type messages struct {
	in  *json.Decoder
	out io.Closer
	enc *json.Encoder
}

func newMessages(in io.Reader, out io.WriteCloser) messages {
	return messages{in: json.NewDecoder(in), out: out, enc: json.NewEncoder(out)}
}

// Send gives the other side one message: any value that JSON holds.
func (m messages) Send(v any) error { return m.enc.Encode(v) }

// Recv waits for the other side's next message and stores it where v points.
// The error is io.EOF where the other side has closed or is gone.
func (m messages) Recv(v any) error {
	err := m.in.Decode(v)
	if errors.Is(err, os.ErrClosed) {
		return io.EOF
	}
	return err
}
