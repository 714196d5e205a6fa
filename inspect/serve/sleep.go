package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/vmm"
)

// SleepOptions determine how a process prepares to be taken off the GPU. The zero value
// suspends all memory of the System that vmm.Suspend takes, and keeps its bytes in host memory.
type SleepOptions struct {
	// Tags name the memory that is suspended; nil means all. The driver takes what is not
	// suspended, too, at a lower rate.
	Tags []cuda.Tag
	// Suspend determines what becomes of the bytes.
	Suspend vmm.SuspendOptions
	// Shared lets memory sleep that was exported once. The program knows then that no other
	// process has it and no descriptor of it is open; memory of which one is would stay on the
	// GPU, and be there twice after the restore.
	Shared bool
	// Before is called first. It stops the program's work on the GPU and closes what keeps the
	// process awake; its error refuses the sleep. After is called when the process is awake
	// again, or stays awake because something failed after Before. Both may be nil.
	Before, After func(ctx context.Context) error
}

// OfferSleep is [Offer], and lets programs of the same user take this process off the GPU and
// put it back: cuvmm sleep and cuvmm wake. docs/sleep-to-zero.md describes what happens. While
// the process sleeps, the socket shows no snapshots.
func OfferSleep(sys *cuda.System, options SleepOptions) (*Offered, error) {
	const op = "serve.OfferSleep"
	if sys == nil {
		return nil, errs.Invalid(op, "a nil System", "pass the one that cuda.Open or auto.Open returned")
	}
	return offer(op, (&sleeper{sys: sys, o: options}).handler())
}

// Blocker keeps a process awake.
type Blocker struct {
	What   string `json:"what"`
	Remedy string `json:"remedy"`
}

// sleeper carries out requests to sleep.
//
//	state      request  next                                   after a failure
//	awake      prepare  ready: Before was called               awake, and After is called
//	ready      suspend  suspended                              awake, and After is called
//	any        wake     awake, and After is called             as before: the memory sleeps on
//
// A request that has been carried out succeeds again. The process is taken off the GPU, and put
// back, while it is suspended.
type sleeper struct {
	sys *cuda.System
	o   SleepOptions

	turn       sync.Mutex      // held over a request
	suspension *vmm.Suspension // nil if there was nothing to suspend; guarded by turn
	given      int             // what it gave back, in bytes; guarded by turn

	mu    sync.Mutex // guards what follows
	state sleepState
	since time.Time // when it was suspended
}

type sleepState int

const (
	awake sleepState = iota
	ready
	suspended
)

func (s *sleeper) now() (sleepState, time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state, s.since
}

func (s *sleeper) set(state sleepState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state, s.since = state, time.Now()
}

// prepare has the program stop its work, and returns what keeps it awake nevertheless.
func (s *sleeper) prepare(ctx context.Context) (all []Blocker, err error) {
	s.turn.Lock()
	defer s.turn.Unlock()
	if state, _ := s.now(); state != awake {
		return nil, nil
	}
	if s.o.Before != nil {
		if err := s.o.Before(ctx); err != nil {
			return nil, fmt.Errorf("the program refuses to sleep: %w", err)
		}
	}
	if s.o.Shared {
		exchange.Warm.Drop() // closes the library's own descriptors
	}
	snapshot, err := inspect.Take(s.sys)
	if err == nil {
		all = blockers(snapshot, s.o.Shared)
	}
	if err != nil || len(all) > 0 {
		return all, errors.Join(err, s.resume(context.WithoutCancel(ctx)))
	}
	s.set(ready)
	return nil, nil
}

// suspend gives back the memory, and returns how much that is.
func (s *sleeper) suspend(ctx context.Context) (given int, err error) {
	s.turn.Lock()
	defer s.turn.Unlock()
	switch state, _ := s.now(); state {
	case awake:
		return 0, errors.New("the process is awake: another request ended the sleep")
	case suspended:
		return s.given, nil
	}
	snapshot, err := inspect.Take(s.sys)
	if err == nil {
		if all := s.memory(snapshot); len(all) > 0 {
			s.suspension, err = vmm.Suspend(ctx, s.o.Suspend, all...)
		}
	}
	if err == nil {
		err = ctx.Err() // who asked is gone: nothing will take the process off the GPU
	}
	if err != nil {
		return 0, errors.Join(err, s.resume(context.WithoutCancel(ctx)))
	}
	s.given = 0
	if s.suspension != nil {
		s.given = s.suspension.Report().Given
	}
	s.set(suspended)
	return s.given, nil
}

// wake brings the memory back, and has the program go on.
func (s *sleeper) wake(ctx context.Context) error {
	s.turn.Lock()
	defer s.turn.Unlock()
	if state, _ := s.now(); state == awake {
		return nil
	}
	return s.resume(ctx)
}

// resume ends what the requests did, which may be half of it.
func (s *sleeper) resume(ctx context.Context) error {
	if s.suspension != nil {
		if err := s.suspension.Resume(ctx); err != nil {
			return err
		}
		s.suspension = nil
	}
	s.set(awake)
	if s.o.After != nil {
		return s.o.After(ctx)
	}
	return nil
}

// memory returns what is suspended: what is awake of the tags.
func (s *sleeper) memory(now inspect.Snapshot) (all []vmm.Memory) {
	tags := s.o.Tags
	if tags == nil {
		tags = tagsOf(now)
	}
	for _, tag := range tags {
		for _, m := range vmm.Tagged(s.sys, tag) {
			if _, err := vmm.Preview(s.o.Suspend, m); !errors.Is(err, cuda.ErrSuspended) {
				all = append(all, m)
			}
		}
	}
	return all
}

// tagsOf returns each tag of memory once.
func tagsOf(s inspect.Snapshot) (tags []cuda.Tag) {
	seen := map[string]bool{}
	add := func(tag string) {
		if !seen[tag] {
			seen[tag] = true
			tags = append(tags, cuda.Tag(tag))
		}
	}
	for _, b := range s.Buffers {
		add(b.Tag)
	}
	for _, x := range s.Sparse {
		add(x.Tag)
	}
	for _, p := range s.Pools {
		add(p.Tag)
	}
	return tags
}

// blockers returns what this library has that no checkpoint can take and bring back.
func blockers(s inspect.Snapshot, shared bool) (all []Blocker) {
	add := func(what, remedy string) { all = append(all, Blocker{what, remedy}) }
	for _, p := range s.Publications {
		add(fmt.Sprintf("publication %q", p.Name), "withdraw it, and close its buffer (SleepOptions.Before); publish again when the process is awake")
	}
	for _, f := range s.Followers {
		add(fmt.Sprintf("follower of %q", f.Name), "close it (SleepOptions.Before), and follow again")
	}
	if n := len(s.Leases); n > 0 {
		add(errs.Count(n, "lease"), "close the leases, when their receivers have the memory")
	}
	var imported, exported int
	for _, m := range s.Memory {
		switch {
		case m.Imported:
			imported += m.Bytes
		case m.Exported && !shared:
			exported += m.Bytes
		}
	}
	if imported > 0 {
		add(errs.Bytes(imported)+" of imported memory, with which the process would be lost", "close what was received or followed, and import again")
	}
	if exported > 0 {
		add(errs.Bytes(exported)+" of memory that was exported, which would stay on the GPU and be there twice afterwards",
			"close it, or set SleepOptions.Shared if no other process has it and no descriptor is open")
	}
	if n := len(s.Managed); n > 0 {
		add(fmt.Sprintf("managed memory (%d)", n), "close it: a checkpoint refuses it")
	}
	teams := 0
	for _, o := range s.Others {
		if o.Kind == "multicast object" {
			teams++
		}
	}
	if teams > 0 {
		add(fmt.Sprintf("multicast object (%d)", teams), "close the team: what a checkpoint makes of it is not known")
	}
	return all
}

// handler serves what Handler does while the process is awake, and the requests.
func (s *sleeper) handler() http.Handler {
	shown := Handler(s.sys)
	requests := map[string]func(ctx context.Context) (any, error){
		"prepare": func(ctx context.Context) (any, error) { return s.prepare(ctx) },
		"suspend": func(ctx context.Context) (any, error) { return s.suspend(ctx) },
		"wake":    func(ctx context.Context) (any, error) { return nil, s.wake(ctx) },
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		do := requests[path.Base(r.URL.Path)]
		state, since := s.now()
		switch {
		case r.Method == http.MethodPost && do != nil:
			result, err := do(r.Context())
			if err != nil {
				http.Error(w, err.Error(), http.StatusConflict)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(result) // an error means that the client is gone
		case state == suspended:
			// A snapshot asks the driver, whose calls may wait until the process is back.
			http.Error(w, "asleep since "+since.Format(time.TimeOnly), http.StatusServiceUnavailable)
		default:
			shown.ServeHTTP(w, r)
		}
	})
}

// Prepare asks a process that called [OfferSleep] to stop its work on the GPU. It returns what
// keeps the process awake; then the process goes on. Otherwise Suspend is next, or Wake. Of a
// process that called [Offer] all three return cuda.ErrNotSupported.
func (s Socket) Prepare(ctx context.Context) (all []Blocker, err error) {
	err = s.request(ctx, "serve.Socket.Prepare", "prepare", &all)
	return all, err
}

// Suspend asks the process, which is prepared, to give back its memory. It returns how many
// bytes that is. The driver can then take the rest.
func (s Socket) Suspend(ctx context.Context) (bytes int, err error) {
	err = s.request(ctx, "serve.Socket.Suspend", "suspend", &bytes)
	return bytes, err
}

// Wake asks the process to bring its memory back and go on. It must be on the GPU.
func (s Socket) Wake(ctx context.Context) error {
	return s.request(ctx, "serve.Socket.Wake", "wake", new(any))
}

func (s Socket) request(ctx context.Context, op, name string, result any) error {
	body, err := s.ask(ctx, op, http.MethodPost, name)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	if err := json.NewDecoder(body).Decode(result); err != nil {
		return fmt.Errorf("%s: process %d: %w", op, s.PID, err)
	}
	return nil
}
