//go:build unix

// Command gpurun runs what scripts/gpu-bundle.sh packed: each test binary and
// program from its own package's folder, one after the other, under a time
// limit. The bundle's run.sh unpacks and starts it, on a machine that has
// neither Go nor the sources.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

const usage = `usage: run.sh [option...] [PACKAGE...] [-- ARGUMENT...]

Runs the tests and programs of the bundle, each from its own package's folder
and under a time limit, and prints one line for each. Exits with 1 if one
failed, with 2 if an argument is wrong or names what the bundle lacks.

PACKAGE is a folder of the repository: vmm, cuda/sim, samples/02-growable, or
vmm/... for vmm and all below it. ARGUMENTs go to the programs; the output of a
program that was named is shown.

All output goes to the end of a log as well: ./cuvmm-gpu.log, or the file that
CUVMM_LOG names.

options:
`

// What a package's folder in the bundle holds.
const (
	tests   = "tests"
	program = "program"
)

type options struct {
	list, bench, noGPU bool
	run                string
	shard              string
	timeout            time.Duration
	packages, args     []string
}

// A job is one binary of one package.
type job struct{ pkg, kind string }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok, err := run(ctx, os.Args[1], os.Args[2:], os.Stdout)
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "run.sh:", err)
		os.Exit(2)
	case !ok:
		os.Exit(1)
	}
}

// run does what the arguments say with the bundle unpacked in dir, and reports whether
// all went well.
func run(ctx context.Context, dir string, args []string, out io.Writer) (ok bool, err error) {
	o, err := parseOptions(args, out)
	if err != nil {
		return false, err
	}
	index, err := os.ReadFile(filepath.Join(dir, "packages"))
	if err != nil {
		return false, fmt.Errorf("this is no unpacked bundle: %w", err)
	}
	jobs, err := choose(string(index), o)
	if err != nil {
		return false, err
	}
	if o.list {
		for _, j := range jobs {
			fmt.Fprintf(out, "%s (%s)\n", j.pkg, j.kind)
		}
		return true, nil
	}

	name := os.Getenv("CUVMM_LOG")
	if name == "" {
		name = "cuvmm-gpu.log"
	}
	log, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return false, fmt.Errorf("opening the log (CUVMM_LOG names another): %w", err)
	}
	defer log.Close()

	both := io.MultiWriter(out, log)
	introduce(ctx, both, log, len(jobs))
	start := time.Now()
	sum, broken, err := runAll(ctx, dir, jobs, o, both, log)
	if err != nil {
		return false, err
	}
	fmt.Fprintf(both, "== %d run, %d failed; tests with their subtests: %d passed, %d failed, %d skipped; %s; log: %s\n",
		len(jobs), len(broken), sum.passed, sum.failed, sum.skipped, time.Since(start).Round(100*time.Millisecond), name)
	if len(broken) > 0 {
		fmt.Fprintf(both, "FAILED: %s\n", strings.Join(broken, ", "))
	}
	return len(broken) == 0, nil
}

// introduce prints where and when this runs, and logs the GPUs.
func introduce(ctx context.Context, both, log io.Writer, jobs int) {
	host, _ := os.Hostname()
	fmt.Fprintf(both, "== %s, %s: %d to run\n", host, time.Now().UTC().Format(time.RFC3339), jobs)
	gpus, err := exec.CommandContext(ctx, "nvidia-smi", "-L").CombinedOutput()
	if err != nil {
		gpus = fmt.Appendf(nil, "nvidia-smi -L: %v\n", err)
	}
	_, _ = log.Write(gpus)
}

// runAll runs the jobs, and returns the sum of their reports and the names of the jobs that failed.
func runAll(ctx context.Context, dir string, jobs []job, o options, both, log io.Writer) (sum report, broken []string, err error) {
	for _, j := range jobs {
		if ctx.Err() != nil {
			return sum, broken, errors.New("interrupted")
		}
		r := j.execute(ctx, dir, o)
		fmt.Fprintf(log, "\n-- %s (%s)\n%s\n", j.pkg, j.kind, r.output)
		r.print(both, j, len(o.packages) > 0)
		sum.passed += r.passed
		sum.failed += r.failed
		sum.skipped += r.skipped
		if r.verdict == failed {
			broken = append(broken, fmt.Sprintf("%s (%s)", j.pkg, j.kind))
		}
	}
	return sum, broken, nil
}

func parseOptions(args []string, out io.Writer) (options, error) {
	var o options
	if i := slices.Index(args, "--"); i >= 0 {
		args, o.args = args[:i], args[i+1:]
	}
	f := flag.NewFlagSet("run.sh", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.BoolVar(&o.list, "list", false, "print what is in the bundle, run nothing")
	f.BoolVar(&o.bench, "bench", false, "run the benchmarks, not the tests and programs")
	f.BoolVar(&o.noGPU, "no-gpu", false, "let tests that need a GPU skip instead of fail, and programs use the software driver")
	f.StringVar(&o.run, "run", ".", "only tests (with -bench: benchmarks) that match `REGEX`; no programs")
	f.StringVar(&o.shard, "shard", "1/1", "`I/N`: every N-th package only, from the I-th on")
	f.DurationVar(&o.timeout, "timeout", 0, "limit for each `TIME`, such as 90s (default 2m, with -bench 7m)")
	if err := f.Parse(args); errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(out, usage)
		f.SetOutput(out)
		f.PrintDefaults()
		return o, err
	} else if err != nil {
		return o, fmt.Errorf("%w (run.sh -help lists the options)", err)
	}
	o.packages = f.Args()
	for i, p := range o.packages {
		if strings.HasPrefix(p, "-") {
			return o, fmt.Errorf("%s stands after a package: options go first, a program's arguments after --", p)
		}
		o.packages[i] = strings.TrimSuffix(p, "/")
	}
	if o.timeout < 0 {
		return o, fmt.Errorf("-timeout %s: give a time above 0, such as 90s", o.timeout)
	}
	if o.timeout == 0 {
		o.timeout = 2 * time.Minute
		if o.bench {
			o.timeout = 7 * time.Minute
		}
	}
	if _, err := regexp.Compile(o.run); err != nil {
		return o, fmt.Errorf("-run: %w", err)
	}
	return o, nil
}

// choose returns the jobs of a bundle's index, whose lines are a package and
// its kinds.
func choose(index string, o options) ([]job, error) {
	var first, step int
	if n, err := fmt.Sscanf(o.shard+" ", "%d/%d ", &first, &step); err != nil || n != 2 || first < 1 || first > step {
		return nil, fmt.Errorf("-shard %s: give I/N with I from 1 to N", o.shard)
	}
	matched := map[string]bool{}
	var jobs []job
	n := 0
	for line := range strings.Lines(index) {
		words := strings.Fields(line)
		wanted := len(o.packages) == 0
		for _, pattern := range o.packages {
			below, all := strings.CutSuffix(pattern, "...")
			if words[0] == pattern || all && strings.HasPrefix(words[0]+"/", below) {
				matched[pattern], wanted = true, true
			}
		}
		if !wanted {
			continue
		}
		if n++; (n-1)%step != first-1 {
			continue
		}
		for _, kind := range words[1:] {
			if kind == tests || !o.bench && o.run == "." {
				jobs = append(jobs, job{words[0], kind})
			}
		}
	}
	for _, pattern := range o.packages {
		if !matched[pattern] {
			return nil, fmt.Errorf("%s is not in the bundle: run.sh -list prints what is", pattern)
		}
	}
	if len(jobs) == 0 && !o.list {
		return nil, errors.New("nothing to run: run.sh -list prints what is in the bundle")
	}
	return jobs, nil
}

// execute runs the job in its folder of dir and reads what it printed.
func (j job) execute(ctx context.Context, dir string, o options) report {
	folder := filepath.Join(dir, filepath.FromSlash(j.pkg))
	cmd := exec.Command(filepath.Join(folder, "program"), o.args...)
	if j.kind == tests {
		// The binary's own limit comes first: it prints where it stands.
		args := []string{"-test.v", "-test.paniconexit0", "-test.timeout=" + (o.timeout * 9 / 10).String()}
		if o.bench {
			args = append(args, "-test.run=^$", "-test.bench="+o.run, "-test.benchmem")
		} else {
			args = append(args, "-test.run="+o.run)
		}
		cmd = exec.Command(filepath.Join(folder, "package.test"), args...)
	}
	cmd.Dir = folder
	// Without a GPU a test that needs one fails by the first variable. By the second a
	// program fails, which would go on with the software driver.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "CUVMM_REQUIRE_GPU=") })
	if !o.noGPU {
		cmd.Env = append(cmd.Env, "CUVMM_REQUIRE_GPU=1")
		if j.kind == program {
			cmd.Env = append(cmd.Env, "CUVMM_DRIVER=real")
		}
	}

	output, took, late, err := runLimited(ctx, cmd, o.timeout)
	r := parse(output)
	r.took = took
	r.judge(j.kind, err, o.bench)
	if late {
		r.note += fmt.Sprintf(", killed at the limit of %s", o.timeout)
	}
	return r
}

// runLimited runs a command and, when the time is up or ctx ends, kills it and
// all that it started in its process group.
func runLimited(ctx context.Context, cmd *exec.Cmd, limit time.Duration) (output string, took time.Duration, late bool, err error) {
	// A file, not a pipe: a process that outlives its parent cannot hold us up.
	file, err := os.CreateTemp("", "cuvmm-output-")
	if err != nil {
		return "", 0, false, fmt.Errorf("a file for the output (TMPDIR names another folder): %w", err)
	}
	defer os.Remove(file.Name())
	defer file.Close()
	cmd.Stdout, cmd.Stderr = file, file
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	start := time.Now()
	if err := cmd.Start(); err != nil {
		return "", 0, false, err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case err = <-done:
	case <-timer.C:
		late = true
	case <-ctx.Done():
	}
	took = time.Since(start)
	// Even after a good end: processes that it left running would disturb the next.
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	if late || ctx.Err() != nil && err == nil {
		err = <-done
	}
	text, readErr := os.ReadFile(file.Name())
	return string(text), took, late, errors.Join(err, readErr)
}
