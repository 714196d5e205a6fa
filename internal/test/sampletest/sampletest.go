// Package sampletest tests the samples: its table says what each of them prints, what it
// refuses, and which failures of the driver it survives without a leak. A sample's own
// folder has a test that runs its row, since no other package can call its main:
//
//	func TestMain(m *testing.M)   { sampletest.Main(m, main) }
//	func TestSample(t *testing.T) { sampletest.Test(t, sample.Name, sample.Test) }
//
// What no row can say is a test beside those two.
package sampletest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/needs"
)

// row is what is tested of one sample.
type row struct {
	runs []run
	// faults are the driver calls of which one fails, after so many that succeed: the
	// sample returns that error, and leaves nothing open. They run on faultsOn with
	// faultArgs.
	faults    map[string]int
	faultsOn  sim.Options
	faultArgs []string
}

// run is one run of a sample, and what it must print. In its arguments and in what it
// prints, $PID is the process that runs the test, $DIR an empty folder, and $FILE a file
// with the input, whose SHA-256 is $SUM.
type run struct {
	name string // of the subtest; the arguments if empty
	args []string

	on      *sim.Options // the machine; nil for the driver that the arguments choose
	seeds   uint64       // runs with so many seeds of the machine, if it is positive
	process bool         // runs the sample's main in a process, with env
	env     []string
	gpu     bool // runs on a GPU alone, with CUVMM_REQUIRE_GPU=1

	input     int    // so many random bytes are in $FILE and on standard input
	full      bool   // the output goes to /dev/full
	interrupt string // interrupts when the sample prints this

	fails string // the error has this text, in one line; "" if the run succeeds
	says  []string
	never []string
	times map[string]int // regular expressions, and how often the output matches each
	calls map[string]int // driver calls, and how often each is made
}

// asSample is set in the processes that tests start: each of them is the sample.
const asSample = "CUVMM_TEST_AS_SAMPLE"

// Main runs the sample's main in a process that a test started, and the tests elsewhere.
func Main(m *testing.M, main func()) {
	if os.Getenv(asSample) != "" {
		main()
		return
	}
	if err := os.Setenv(asSample, "1"); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// Run runs a sample in this process: on sys, or on the driver that the arguments choose if
// sys is nil.
type Run func(ctx context.Context, sys *cuda.System, args []string, in io.Reader, out io.Writer) error

// Test runs the row of the sample with that name. If every run of the row is a process of
// its own, sample may be nil.
func Test(t *testing.T, name string, sample Run) {
	row, ok := table[name]
	require.True(t, ok, "internal/test/sampletest/table.go has no row for %s", name)
	for _, r := range row.runs {
		name := r.name
		if name == "" {
			name = strings.Join(r.args, " ")
		}
		t.Run(name, func(t *testing.T) {
			for seed := range max(r.seeds, 1) {
				r.test(t, sample, seed)
			}
		})
	}
	for call, after := range row.faults {
		t.Run(call+" fails", func(t *testing.T) {
			m, sys := sim.Open(t, row.faultsOn)
			m.Inject(sim.Fault{Call: call, After: after, Result: 999})
			require.ErrorContains(t, sample(t.Context(), sys, row.faultArgs, nil, io.Discard), call)
			require.Empty(t, sys.Live())
		})
	}
}

func (r run) test(t *testing.T, sample Run, seed uint64) {
	if r.gpu && os.Getenv("CUVMM_REQUIRE_GPU") == "" {
		t.Skip("set CUVMM_REQUIRE_GPU=1 to run on this machine's GPU")
	}
	input := make([]byte, r.input)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(input)
	r.expand(t, input)

	var m *sim.Machine
	var sys *cuda.System
	if r.on != nil {
		o := *r.on
		if r.seeds > 0 {
			o.Seed = seed
		}
		m, sys = sim.Open(t, o)
	}
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	out := &output{at: r.interrupt, interrupt: interrupt}
	var to io.Writer = out
	if r.full {
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		if err != nil {
			needs.Lacks(t, "/dev/full: %v", err)
		}
		defer full.Close()
		to = full
	}
	var err error
	if r.process {
		err = r.start(ctx, to, out)
	} else {
		err = sample(ctx, sys, r.args, bytes.NewReader(input), to)
	}
	r.check(t, out.String(), err)
	if !r.gpu { // where the driver may leave files of its own
		stays, err := os.ReadDir(os.TempDir())
		require.NoError(t, err)
		require.Empty(t, stays, "the sample leaves files behind")
	}
	for call, n := range r.calls {
		require.Equal(t, n, m.Count(call), call)
	}
	if m != nil {
		require.Empty(t, m.Fault())
	}
}

// expand writes the input, replaces the names of run's comment, and gives the run empty
// folders for temporary files and for the sockets of serve.Offer.
func (r *run) expand(t *testing.T, input []byte) {
	file := filepath.Join(t.TempDir(), "input")
	require.NoError(t, os.WriteFile(file, input, 0o600))
	names := map[string]string{
		"PID": fmt.Sprint(os.Getpid()), "DIR": t.TempDir(), "FILE": file, "SUM": fmt.Sprintf("%x", sha256.Sum256(input)),
	}
	all := func(texts []string) []string {
		var expanded []string
		for _, text := range texts {
			expanded = append(expanded, os.Expand(text, func(name string) string { return names[name] }))
		}
		return expanded
	}
	r.args, r.says, r.never = all(r.args), all(r.says), all(r.never)
	sockets, err := os.MkdirTemp("", "run") //nolint:usetesting // which makes longer paths than a socket's may be
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(sockets)) })
	t.Setenv("XDG_RUNTIME_DIR", sockets)
	t.Setenv("TMPDIR", t.TempDir())
}

// start runs the sample as a process, which gets a signal when ctx ends. All that it prints
// is in its error.
func (r *run) start(ctx context.Context, stdout io.Writer, out *output) error {
	cmd := exec.CommandContext(ctx, os.Args[0], r.args...)
	cmd.Env = append(os.Environ(), r.env...)
	cmd.Stdout, cmd.Stderr = stdout, out
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	if err := cmd.Run(); err != nil && !(errors.Is(err, context.Canceled) && cmd.ProcessState.Success()) {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(out.String()))
	}
	return nil
}

// check checks what was printed, and the error.
func (r *run) check(t *testing.T, said string, err error) {
	if r.gpu {
		t.Log(said)
	}
	if r.fails == "" {
		require.NoError(t, err, said)
	} else {
		require.ErrorContains(t, err, r.fails)
	}
	if r.fails != "" && !r.full { // a full device fails every process that prints
		require.NotContains(t, err.Error(), "\n", "the error names what follows from its cause, too")
	}
	if r.fails != "" && r.interrupt != "" {
		require.ErrorIs(t, err, context.Canceled)
	}
	for _, text := range r.says {
		require.Contains(t, said, text)
	}
	for _, text := range r.never {
		require.NotContains(t, said, text)
	}
	for pattern, n := range r.times {
		require.Len(t, regexp.MustCompile(pattern).FindAllString(said, -1), n, "%q in %s", pattern, said)
	}
}

// output is what a sample prints, from one goroutine at a time. It interrupts the sample once
// that has a text, unless the text is empty.
type output struct {
	strings.Builder
	at        string
	interrupt func()
}

func (o *output) Write(p []byte) (int, error) {
	n, err := o.Builder.Write(p)
	if o.at != "" && strings.Contains(o.String(), o.at) {
		o.interrupt()
	}
	return n, err
}
