package main

import (
	"cmp"
	"context"
	"encoding/csv"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/serve"
	"github.com/cuvmm/cuvmm/internal/errs"
)

const topUsage = `usage: cuvmm top [flags]

Lists the processes of this user that offer their maps (serve.Offer), with their pools,
publications and followers, and what followers keep pinned. Other processes on the GPUs
are listed as NVML sees them, through nvidia-smi if it is installed.

  ON GPUS    memory on GPUs as NVML counts it, contexts included
  ALLOCATED  memory of the library, as the process counts it; imported memory is
             counted here too, by each process that has it
  POOLS      what of it pools have reserved
  REQUESTED  what of that is in blocks

Below a process are its publications, followers and leases, how much of its memory is
suspended, what pinned host memory it retains, its budgets (cuda.Budget), and the objects and
publications of a broker (cuvmm serve) that it holds. The broker's objects are listed behind the processes: they are memory on
GPUs, also those that no process holds.

Flags:
`

// process is a process that uses a GPU.
type process struct {
	PID  int    `json:"pid"`
	Name string `json:"name"`
	// Bytes is the memory that the process has on GPUs as NVML counts it, contexts and
	// other libraries' memory included, and Allocated what the process counts itself. Both
	// are nil if they are not known.
	Bytes     *int `json:"bytes,omitempty"`
	Allocated *int `json:"allocated,omitempty"`
	// Offers reports whether the process offers its map, of which Map is a summary.
	Offers bool              `json:"offers"`
	Map    *inspect.Snapshot `json:"map,omitempty"`
	// Error is why the map could not be read.
	Error string `json:"error,omitempty"`
	// Asleep reports whether that is because cuvmm sleep took the process off the GPUs.
	Asleep bool `json:"asleep,omitempty"`
	// Objects are those of a broker that it holds.
	Objects []broker.Listing `json:"objects,omitempty"`
}

// most returns the larger of both counts, or 0 if neither is known.
func (p process) most() (bytes int) {
	for _, n := range []*int{p.Bytes, p.Allocated} {
		if n != nil {
			bytes = max(bytes, *n)
		}
	}
	return bytes
}

func top(f *flag.FlagSet) func(args []string, out io.Writer, h host) (int, error) {
	asJSON := f.Bool("json", false, "print JSON")
	socket := f.String("socket", defaultSocket(), "the `path` of a broker's socket")
	every := f.Duration("every", 0, "list again after this time, until interrupted")
	return func(_ []string, out io.Writer, h host) (int, error) {
		if *every < 0 {
			return exitUsage, fmt.Errorf("-every %v: a time is not negative", *every)
		}
		ctx, stop := untilEnded()
		defer stop()
		if *asJSON {
			h.screen = nil // JSON is for programs
		}
		h.progress.step("asking the processes for their memory")
		err := h.repeat(ctx, out, *every, func(w io.Writer) error {
			all, note, err := processes(ctx, h)
			if err != nil {
				return err
			}
			kept, silent := keptAt(ctx, h, *socket)
			h.progress.end()
			all = withObjects(h, all, kept)
			if *asJSON {
				return errs.Both(writeJSON(w, all), silent)
			}
			writeProcesses(plain{w}, all, note)
			if silent != nil {
				fmt.Fprintf(plain{w}, "objects of a broker are not listed: %v\n", silent)
			}
			if len(kept) > 0 {
				fmt.Fprintf(plain{w}, "\nobjects of the broker at %s:\n", *socket)
				writeObjects(plain{w}, kept)
			}
			return nil
		})
		if err != nil {
			return exitFailed, err
		}
		return exitOK, nil
	}
}

// processes returns the processes that offer their maps and the ones that NVML lists, the
// largest first. note says what is missing.
func processes(ctx context.Context, h host) (all []process, note string, err error) {
	all, err = offering(ctx, h)
	if err != nil {
		return nil, "", err
	}
	others, err := seen(h)
	if err != nil {
		note = "processes that offer no map are not listed: " + err.Error()
	}
	for _, o := range others {
		at := slices.IndexFunc(all, func(p process) bool { return p.PID == o.PID })
		if at < 0 {
			all = append(all, o)
		} else {
			all[at].Bytes = o.Bytes
		}
	}
	slices.SortStableFunc(all, func(a, b process) int { return cmp.Compare(b.most(), a.most()) })
	return all, note, nil
}

// keptAt returns the objects of the broker at a socket, if there is one.
func keptAt(ctx context.Context, h host, path string) ([]broker.Listing, error) {
	ctx, cancel := context.WithTimeout(ctx, replyTimeout)
	defer cancel()
	k, err := connect(ctx, h, path)
	if errors.Is(err, errNoBroker) || errors.Is(err, errors.ErrUnsupported) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	all, err := k.List(ctx)
	return all, errs.Both(err, k.Close())
}

// withObjects adds to each process which objects it holds, and processes that are seen by that alone.
func withObjects(h host, all []process, kept []broker.Listing) []process {
	for _, l := range kept {
		for _, p := range l.HeldBy {
			if p.PID == 0 {
				continue // of another namespace
			}
			at := slices.IndexFunc(all, func(o process) bool { return o.PID == p.PID })
			if at < 0 {
				at, all = len(all), append(all, process{PID: p.PID, Name: h.text(fmt.Sprintf("proc/%d/comm", p.PID))})
			}
			all[at].Objects = append(all[at].Objects, l)
		}
	}
	return all
}

// offering returns the processes that offer their maps.
func offering(ctx context.Context, h host) ([]process, error) {
	found, err := serve.Find(ctx)
	all := make([]process, len(found))
	var asking sync.WaitGroup
	for i, s := range found {
		asking.Go(func() { all[i] = summary(ctx, h, s) })
	}
	asking.Wait()
	return all, err
}

// suspended returns the processes that have suspended memory, or sleep off the GPUs, of those
// that offer their maps.
func suspended(h host) (all []finding) {
	running, err := offering(context.Background(), h)
	if err != nil {
		return []finding{{Check: "suspended memory", Severity: note, Device: machine, Seen: err.Error(), Means: "it is not known which processes have suspended memory"}}
	}
	for _, p := range running {
		if p.Asleep {
			all = append(all, finding{Check: "suspended memory", Severity: note, Device: machine,
				Seen:   fmt.Sprintf("process %d (%s) sleeps off the devices", p.PID, p.Name),
				Means:  "the devices have all of its memory for others, and without room for it cuvmm wake loses the process",
				Remedy: fmt.Sprintf("leave room for it, and put it back with cuvmm wake %d; or end it", p.PID)})
		}
		if p.Map == nil || p.Map.Totals.Suspended == 0 {
			continue
		}
		t := p.Map.Totals
		all = append(all, finding{Check: "suspended memory", Severity: note, Device: machine,
			Seen:   fmt.Sprintf("process %d (%s) has suspended %s, of which host memory keeps %s", p.PID, p.Name, size(t.SuspendedBytes), size(t.KeptBytes)),
			Means:  "the devices have that memory for others, and the process needs it again to go on: Resume waits for it, or fails",
			Remedy: "leave room for it, or end the process, which frees the host memory, too"})
	}
	return all
}

// replyTimeout limits the wait for a process, so that a stopped one does not
// delay the list.
const replyTimeout = 3 * time.Second

// summary asks a process for a summary of its map.
func summary(ctx context.Context, h host, s serve.Socket) process {
	m, err := within("it", replyTimeout, s.Summary)(ctx)
	if err == nil {
		allocated := m.Totals.AllocatedBytes + m.Totals.ManagedBytes
		return process{PID: s.PID, Name: m.Process.Name, Allocated: &allocated, Offers: true, Map: &m}
	}
	return process{PID: s.PID, Name: h.text(fmt.Sprintf("proc/%d/comm", s.PID)), Offers: true, Error: err.Error(), Asleep: errors.Is(err, cuda.ErrSuspended)}
}

// seen returns the processes that NVML lists, each once however many GPUs it uses.
func seen(h host) (all []process, err error) {
	text, err := h.probe("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits")
	if err != nil {
		return nil, err
	}
	r := csv.NewReader(strings.NewReader(text))
	r.FieldsPerRecord, r.LazyQuotes, r.TrimLeadingSpace = -1, true, true
	for {
		line, err := r.Read()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("nvidia-smi: %w", err)
		}
		pid, err := strconv.Atoi(line[0])
		if err != nil || len(line) < 3 {
			continue // "No running processes found"
		}
		at := slices.IndexFunc(all, func(p process) bool { return p.PID == pid })
		if at < 0 {
			name := strings.Join(line[1:len(line)-1], ",")
			at, all = len(all), append(all, process{PID: pid, Name: name[strings.LastIndex(name, "/")+1:]})
		}
		if mib, err := strconv.Atoi(line[len(line)-1]); err == nil {
			bytes := mib << 20
			if before := all[at].Bytes; before != nil {
				bytes += *before
			}
			all[at].Bytes = &bytes
		}
	}
}

func writeProcesses(out io.Writer, all []process, note string) {
	known := func(bytes *int) string {
		if bytes == nil {
			return "?"
		}
		return size(*bytes)
	}
	fmt.Fprintf(out, "%8s  %-24s %10s %10s %10s %10s\n", "PID", "PROCESS", "ON GPUS", "ALLOCATED", "POOLS", "REQUESTED")
	for _, p := range all {
		allocated, pools, requested := "", "", ""
		if p.Map != nil {
			r, q := 0, 0
			for _, one := range p.Map.Pools {
				r, q = r+one.Reserved, q+one.Requested
			}
			allocated, pools, requested = known(p.Allocated), size(r), size(q)
		}
		line := fmt.Sprintf("%8d  %-24s %10s %10s %10s %10s", p.PID, shortTo(p.Name, 24), known(p.Bytes), allocated, pools, requested)
		fmt.Fprintln(out, strings.TrimRight(line, " "))
		switch {
		case p.Asleep:
			fmt.Fprintf(out, "%8s  sleeps off the GPUs: cuvmm wake %d puts it back\n", "", p.PID)
		case p.Error != "":
			fmt.Fprintf(out, "%8s  does not show its map: %s\n", "", p.Error)
		case p.Map != nil:
			writeShared(out, *p.Map)
		}
		for _, l := range p.Objects {
			fmt.Fprintf(out, "%8s  %s: %s\n", "", whatItHolds(l), size(l.Bytes))
		}
	}
	if len(all) == 0 {
		fmt.Fprintln(out, "no process is seen that uses a GPU")
	}
	if note != "" {
		fmt.Fprintln(out, note)
	}
}

// whatItHolds says what the process that holds an object does with it.
func whatItHolds(l broker.Listing) string {
	switch name := errs.Words(l.Name); {
	case l.Publication:
		return "publishes " + name + ", which a broker keeps"
	case l.Version == 0:
		return "writes object " + name
	default:
		return fmt.Sprintf("holds object %s, version %d", name, l.Version)
	}
}

// shortTo cuts a text to at most that many characters.
func shortTo(text string, most int) string {
	if all := []rune(text); len(all) > most {
		return string(all[:most-1]) + "…"
	}
	return text
}

// writeBudgets writes a line for each budget.
func writeBudgets(out io.Writer, all []inspect.Budget) {
	title := func(b inspect.Budget) string {
		if b.Name != "" {
			return strconv.Quote(b.Name)
		}
		return strconv.Itoa(b.Serial)
	}
	for _, b := range all {
		limit := "without a limit"
		if b.Limit > 0 {
			limit = "of " + size(b.Limit)
		}
		within := ""
		if at := slices.IndexFunc(all, func(o inspect.Budget) bool { return o.Serial == b.Parent }); at >= 0 {
			within = ", within " + title(all[at])
		}
		fmt.Fprintf(out, "%8s  budget %s: %s %s, at most %s so far%s\n", "", title(b), size(b.Committed), limit, size(b.Peak), within)
	}
}

// writeShared writes what a process shares with others, and what else it holds.
func writeShared(out io.Writer, s inspect.Snapshot) {
	for _, p := range s.Publications {
		fmt.Fprintf(out, "%8s  publishes %q: %s, %d followers, %s pinned%s\n", "", p.Name, size(p.Bytes), len(p.Followers), size(p.Pinned), sleeps(p.Suspended))
		for _, f := range p.Followers {
			line := fmt.Sprintf("process %d has %s", f.PID, size(f.Bytes))
			if f.Pinned > 0 {
				line += ", and keeps " + size(f.Pinned) + " pinned"
			}
			fmt.Fprintf(out, "%10s  %s%s\n", "", line, reason("refused the last generation", f.Refused))
		}
	}
	for _, f := range s.Followers {
		fmt.Fprintf(out, "%8s  follows %q of process %d: %s%s%s\n", "", f.Name, f.PID, size(f.Bytes), sleeps(f.Suspended), reason("stuck", f.Stuck))
	}
	if t := s.Totals; t.Suspended > 0 {
		fmt.Fprintf(out, "%8s  sleeps: %s of memory are suspended, of which host memory keeps %s\n", "", size(t.SuspendedBytes), size(t.KeptBytes))
	}
	if n := s.Totals.IdleHostBytes; n > 0 {
		fmt.Fprintf(out, "%8s  retains %s of pinned host memory that nothing uses\n", "", size(n))
	}
	writeBudgets(out, s.Budgets)
	if n := s.Totals.Leftovers; n > 0 {
		fmt.Fprintf(out, "%8s  %s that could not be given back, tried again: %s of memory\n", "", errs.Count(n, "resource"), size(s.Totals.LeftoverBytes))
	}
	if n := len(s.Leases); n > 0 {
		fmt.Fprintf(out, "%8s  %d leases are open\n", "", n)
	}
}
