// Command 18-two-tenants lets processes take turns on one GPU that has room for one of them.
// Each suspends its memory when its turn is over: the memory goes to the next one, the
// addresses stay. When its turn comes again it resumes, and finds every byte where it was.
//
//	go run ./samples/18-two-tenants [-driver auto|real|sim] [-tenants 2] [-turns 3] [-mib 64]
//	go run ./samples/18-two-tenants -together     the next one resumes while the one before is still suspending
//	go run ./samples/18-two-tenants -reader       another process follows the weights of the first one
//
// On the software driver all processes are on the machine of one folder.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm"
)

var sample = app.Sample{
	Name:  "18-two-tenants",
	Shows: "processes that hand one GPU to each other, and keep their addresses",
	Next:  "19-weights: a file of tensors that another process finds by name",
	Run:   run,
}

func main() { app.Main(sample) }

const mib = 1 << 20

// options are the flags, which the tenants get too.
type options struct {
	tenants, turns, mib int
	together, reader    bool
	folder              string
	number              int // of a tenant
}

func run(e *app.Env) (err error) {
	var o options
	e.Flags.IntVar(&o.tenants, "tenants", 2, "how many processes take turns")
	e.Flags.IntVar(&o.turns, "turns", 3, "how many turns each of them has")
	e.Flags.IntVar(&o.mib, "mib", 64, "how many `MiB` of GPU memory each has, a multiple of 16")
	e.Flags.BoolVar(&o.together, "together", false, "let one resume while the one before is still suspending")
	e.Flags.BoolVar(&o.reader, "reader", false, "let another process follow the weights of the first one, and check them, too")
	e.Flags.StringVar(&o.folder, "folder", "", "the software machine's `folder` (default: a new one)")
	e.Flags.IntVar(&o.number, "number", 0, "the `number` of a tenant that the sample itself starts")
	if err := e.Parse(); err != nil {
		return err
	}
	if o.tenants < 1 || o.turns < 1 || o.mib < 16 || o.mib > 1<<20 || o.mib%16 != 0 {
		return app.Usagef("-tenants %d -turns %d -mib %d: use at least 1 of each, and a multiple of 16 MiB, up to 1048576", o.tenants, o.turns, o.mib)
	}
	if o.folder == "" {
		if o.folder, err = os.MkdirTemp("", "cuvmm-tenants"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(o.folder)) }()
	}
	e.Machine = sim.Options{Folder: o.folder, Devices: []sim.DeviceOptions{{Memory: (2*o.mib + 64) * mib}}}
	if err := e.Open(); err != nil {
		return err
	}
	switch e.Role {
	case "tenant":
		return rent(e, o)
	case "reader":
		return read(e, o)
	}
	return takeTurns(e, o)
}

// takeTurns starts the tenants and wakes one after the other.
func takeTurns(e *app.Env, o options) (err error) {
	ctx, cancel := context.WithCancel(e.Context) // one that fails ends the others
	defer cancel()
	var all []*tenant
	var reader *tenant // of the first one's weights, if there is one
	defer func() {
		if err != nil {
			cancel()
		}
		if reader != nil {
			err = errors.Join(err, reader.end(ctx))
		}
		for _, t := range all {
			err = errors.Join(err, t.end(ctx))
		}
	}()
	for i := range o.tenants { // one after the other, since there is room for one
		t, err := start(ctx, e, o, "tenant", i)
		if err != nil {
			return err
		}
		all = append(all, t)
		if _, err := t.ask(ctx, work); err != nil {
			return err
		}
		if o.reader && i == 0 {
			if reader, err = start(ctx, e, o, "reader", i); err != nil {
				return err
			}
			if _, err := reader.ask(ctx, work); err != nil {
				return err
			}
		}
		if _, err := t.ask(ctx, sleep); err != nil {
			return err
		}
	}
	filler, err := fill(e, o.mib*mib)
	defer func() {
		for _, f := range filler {
			err = errors.Join(err, f.Close())
		}
	}()
	if err != nil {
		return err
	}

	var free, host spread // while the first one is awake
	var awake *tenant
	for turn := range o.turns {
		for i, next := range all {
			if err := handOver(ctx, e, awake, next, o); err != nil {
				return err
			}
			awake = next
			if _, err := next.ask(ctx, work); err != nil {
				return err
			}
			if i > 0 {
				continue
			}
			if reader != nil {
				if _, err := reader.ask(ctx, work); err != nil {
					return err
				}
			}
			n, _, err := e.Device.MemoryInfo()
			if err != nil {
				return err
			}
			free.add(n)
			host.add(hostOf(all))
			if turn%10 == 0 {
				e.Line("memory", "turn %d: %d MiB of the GPU's are free, the tenants have %d MiB of the host's, of which %d MiB are available", turn, n/mib, hostOf(all)/mib, available()/mib)
			}
		}
	}
	if _, err := awake.ask(ctx, sleep); err != nil {
		return err
	}
	e.Line("free", "%d MiB of GPU memory in each turn of tenant 0, within %d KiB", free.least/mib, (free.most-free.least)>>10)
	e.Line("host", "%d MiB of host memory of all tenants in each turn of tenant 0, within %d MiB", host.least/mib, (host.most-host.least)/mib)
	e.Line("verified", "each of %d tenants found all of its %d MiB in each of %d turns", o.tenants, o.mib, o.turns)
	if reader != nil {
		e.Line("verified", "the reader found all of tenant 0's weights in each of its turns")
	}
	return nil
}

// spread is the least and the most of numbers.
type spread struct{ least, most int }

func (s *spread) add(n int) {
	if s.most == 0 {
		s.least = n
	}
	s.least, s.most = min(s.least, n), max(s.most, n)
}

// hostOf returns how much host memory tenants have.
func hostOf(all []*tenant) (n int) {
	for _, t := range all {
		n += t.host
	}
	return n
}

// handOver lets one tenant sleep and wakes the next. The one that wakes waits for the memory.
func handOver(ctx context.Context, e *app.Env, from, to *tenant, o options) error {
	began := time.Now()
	var out reply
	var failed error
	asleep := make(chan struct{})
	go func() {
		defer close(asleep)
		if from != nil {
			out, failed = from.ask(ctx, sleep)
		}
	}()
	if !o.together || from == to {
		if <-asleep; failed != nil {
			return failed
		}
	}
	in, err := to.ask(ctx, wake)
	<-asleep
	if err := errors.Join(failed, err); err != nil {
		return err
	}
	total := time.Since(began)
	rate := func(d time.Duration) string {
		if d == 0 {
			return "nothing"
		}
		return fmt.Sprintf("%v (%.1f GB/s)", d.Round(10*time.Microsecond), float64(o.mib)*mib/d.Seconds()/1e9)
	}
	e.Line("tenant", "%d is awake: out %s, in %s, hand-over %v", to.number, rate(out.Took), rate(in.Took), total.Round(10*time.Microsecond))
	return nil
}

// fill takes memory until there is room for one tenant and a half.
func fill(e *app.Env, bytes int) (all []*vmm.Allocation, err error) {
	const most = 1 << 30
	for {
		free, _, err := e.Device.MemoryInfo()
		if err != nil {
			return all, err
		}
		n := min(most, free-bytes-min(bytes/2, 256*mib)) / (2 * mib) * (2 * mib)
		if n <= 0 {
			e.Line("filler", "%d pieces, so that %d MiB of GPU memory are free", len(all), free/mib)
			return all, nil
		}
		a, err := vmm.Create(e.Device, n, vmm.Properties{})
		if err != nil {
			return all, err
		}
		all = append(all, a)
	}
}
