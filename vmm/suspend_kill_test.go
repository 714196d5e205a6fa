//go:build linux && (amd64 || arm64)

package vmm_test

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func init() { reexec.Register("tenant", rent) }

// turn is what a tenant is told to do: to "suspend", to "resume", or to "end".
type turn struct {
	Do string
	// Kill ends the process at its so manieth driver call, or at the end of what it does; 0 never.
	Kill int
}

// tenancy is what a tenant says when it has done that.
type tenancy struct {
	Calls int
	// Has is what it has of each device's memory when it is awake.
	Has [2]int
}

// tenantChunks is how many chunks of the first device a tenant has.
const tenantChunks = 4 + 1 + 3 + 1

// tenantMachine is one with room for a tenant and a half on its first device.
func tenantMachine(folder string) sim.Options {
	return sim.Options{Folder: folder, Devices: []sim.DeviceOptions{
		{Granularity: kib64, Memory: tenantChunks * kib64 * 3 / 2}, {Granularity: kib64, Memory: 64 * kib64},
	}}
}

// renter is a tenant's process.
type renter struct {
	*world
	far   *vmm.Buffer
	turns int
	sum   uint32
}

// rent is a tenant: it has memory of all kinds, which sleeps and wakes as it is told, and whose
// contents it checks each time.
func rent(c *reexec.Child) error {
	m, err := sim.New(tenantMachine(c.Args[0]))
	if err != nil {
		return err
	}
	sys, err := m.Open(cuda.Options{})
	if err != nil {
		return err
	}
	failed := new(failure)
	w := &world{t: failed, m: m, sys: sys, d: sys.Devices()[0], peer: sys.Devices()[1]}
	r := &renter{world: w}
	if err := failed.of(func() { r.move() }); err != nil {
		return err
	}
	for do := (turn{Do: "begin"}); ; {
		var calls atomic.Int64
		m.OnCall(func(call string) {
			// How often a wait asks is chance, and what asks changes nothing.
			if !asks[call] && calls.Add(1) == int64(do.Kill) {
				die()
			}
		})
		if err := failed.of(func() { r.do(do.Do) }); err != nil {
			return fmt.Errorf("%s: %w", do.Do, err)
		}
		if do.Kill > 0 {
			die()
		}
		m.OnCall(nil)
		has := [2]int{tenantChunks * kib64, 2 * kib64}
		if err := c.Send(tenancy{Calls: int(calls.Load()), Has: has}); err != nil {
			return err
		}
		if do.Do == "end" {
			return nil
		}
		if err := c.Recv(&do); err != nil {
			return err
		}
	}
}

var asks = map[string]bool{"cuStreamQuery": true, "cuEventQuery": true, "cuMemGetInfo": true}

func die() { _ = syscall.Kill(os.Getpid(), syscall.SIGKILL) }

// failure collects what a child's checks found.
type failure struct{ err error }

// Errorf implements require.TestingT.
func (f *failure) Errorf(format string, args ...any) {
	f.err = errors.Join(f.err, fmt.Errorf(format, args...))
}

// FailNow implements require.TestingT.
func (f *failure) FailNow() { panic(f) }

// of runs checks, and returns what they found.
func (f *failure) of(checks func()) error {
	defer func() {
		if r := recover(); r != nil && r != any(f) {
			panic(r)
		}
	}()
	checks()
	return f.err
}

// move makes the tenant's memory.
func (r *renter) move() {
	var err error
	r.s, err = r.d.NewStream(cuda.StreamOptions{})
	require.NoError(r.t, err)
	r.own(r.s)
	limit := cuda.NewBudget(0, cuda.BudgetOptions{Name: "tenant"})
	b, err := vmm.NewBuffer(r.d, vmm.BufferOptions{Reserve: 16 * kib64, Chunks: vmm.FixedChunks(kib64), Access: both(r.world, vmm.ReadWrite), Budget: limit})
	require.NoError(r.t, err)
	r.own(b)
	require.NoError(r.t, b.Resize(r.s, 4*kib64))
	fork, err := b.Fork(r.s, 2*kib64+100, vmm.ForkOptions{}) // one chunk more
	require.NoError(r.t, err)
	r.own(fork)
	r.buffers = []*vmm.Buffer{b, fork}
	r.sparse(3)
	r.mappings(1, both(r.world, vmm.ReadOnly)...)
	r.far, err = vmm.NewBuffer(r.peer, vmm.BufferOptions{Reserve: 16 * kib64, Chunks: vmm.FixedChunks(kib64)})
	require.NoError(r.t, err)
	r.own(r.far)
	require.NoError(r.t, r.far.Resize(nil, 2*kib64))
	r.buffers = append(r.buffers, r.far)
	require.NoError(r.t, r.s.Synchronize())
	r.write()
}

// all calls f for each stretch of the tenant's memory.
func (r *renter) all(f func(at cuda.Ptr, n int)) {
	for _, b := range r.buffers {
		f(b.Ptr(), b.Len())
	}
	f(r.ranges[0].Ptr(), 3*kib64)
	f(r.maps[0].Ptr(), kib64)
}

// write writes what differs from turn to turn, and from tenant to tenant.
func (r *renter) write() {
	r.turns++
	i := os.Getpid() + r.turns
	r.all(func(at cuda.Ptr, n int) {
		i++
		require.NoError(r.t, r.m.Poke(at, pattern(n, i)))
	})
	r.sum = r.hash()
}

func (r *renter) hash() uint32 {
	sum := crc32.NewIEEE()
	r.all(func(at cuda.Ptr, n int) {
		got, err := r.m.Bytes(at, n)
		require.NoError(r.t, err)
		_, _ = sum.Write(got)
	})
	return sum.Sum32()
}

func (r *renter) do(what string) {
	ctx, cancel := context.WithTimeout(r.ctx(), testTimeout)
	defer cancel()
	switch what {
	case "suspend":
		var err error
		r.sleep, err = vmm.Suspend(ctx, vmm.SuspendOptions{}, r.memories()...)
		require.NoError(r.t, err)
		require.Zero(r.t, r.sleep.Report().Held)
	case "resume":
		require.NoError(r.t, r.sleep.Resume(ctx, r.buffers[1])) // which brings a part of another
		require.NoError(r.t, r.sleep.Resume(ctx))
		require.Equal(r.t, r.sum, r.hash())
		r.write()
	case "end":
		for i := len(r.owned) - 1; i >= 0; i-- {
			require.NoError(r.t, r.owned[i].Close())
		}
		require.NoError(r.t, r.drain())
		require.NoError(r.t, r.sys.Close())
		require.Empty(r.t, r.m.Fault())
		require.NoError(r.t, r.m.Close()) // nothing is left
	}
}

// tenant is one of those that take turns; cmd is nil when it was killed and has not moved in again.
type tenant struct{ cmd *reexec.Cmd }

// house has tenants that take turns on one machine.
type house struct {
	t      *testing.T
	folder string
	all    []*tenant
	awake  *tenant
	// For each thing to do: how often a tenant was killed in it, at a driver call that was counted out
	// or at any moment, and how many driver calls it makes.
	counted, atAny, calls map[string]int
	at                    string
}

func (h *house) begin(x *tenant) {
	x.cmd = reexec.Command(h.t, "tenant", h.folder)
	x.cmd.Start()
	x.hear()
	h.awake = x
}

func (x *tenant) hear() (y tenancy) {
	x.cmd.Recv(&y)
	return y
}

// tell has a tenant do something.
func (h *house) tell(x *tenant, what string) {
	x.cmd.Send(turn{Do: what})
	h.calls[what] = max(h.calls[what], x.hear().Calls)
}

// kill has a tenant do something in which it is killed: at a driver call that is counted out, or, with
// random, at any moment.
func (h *house) kill(x *tenant, what string, stride int, random *rand.Rand) {
	if random == nil {
		x.cmd.Send(turn{Do: what, Kill: 1 + h.counted[what]*stride%(h.calls[what]+1)})
		h.counted[what]++
	} else {
		x.cmd.Send(turn{Do: what})
		time.Sleep(time.Duration(random.IntN(8000)) * time.Microsecond)
		_ = x.cmd.Process.Kill()
		h.atAny[what]++
	}
	err := x.cmd.Exit()
	var exit *exec.ExitError
	require.ErrorAs(h.t, err, &exit, h.at)
	status, ok := exit.Sys().(syscall.WaitStatus)
	require.True(h.t, ok && status.Signal() == syscall.SIGKILL, "%s: %v\n%s", h.at, err, x.cmd.Log())
	x.cmd = nil
}

// handOver has the tenant that is awake sleep and the next wake, side by side, while one of them is killed.
func (h *house) handOver(kill string, stride int, random *rand.Rand) {
	from, to := h.awake, h.next()
	h.awake = nil
	if kill == "suspend" {
		to.cmd.Send(turn{Do: "resume"})
		h.kill(from, kill, stride, random)
		to.hear()
		h.awake = to
	} else {
		from.cmd.Send(turn{Do: "suspend"})
		h.kill(to, kill, stride, random)
		from.hear()
	}
}

// next is the tenant behind the one that is awake.
func (h *house) next() *tenant { return h.all[(slices.Index(h.all, h.awake)+1)%len(h.all)] }

// moveIn has tenants take the places of those that are dead, for which the one that is awake sleeps.
func (h *house) moveIn() {
	for _, x := range h.all {
		if x.cmd != nil {
			continue
		}
		if h.awake != nil {
			h.tell(h.awake, "suspend")
		}
		h.begin(x)
	}
}

// check looks at the machine as a process that has no part in it: the memory of what was killed is
// free, and the tenant that is awake has its own.
func (h *house) check() {
	living := 0
	for _, x := range h.all {
		if x.cmd != nil {
			living++
		}
	}
	var want [2]int
	if h.awake != nil {
		want = [2]int{tenantChunks, 2}
	}
	var u sim.Usage
	var taken [2]int
	for end := time.Now().Add(testTimeout); ; time.Sleep(time.Millisecond) {
		var err error
		u, err = sim.Inspect(h.folder)
		require.NoError(h.t, err)
		taken = [2]int{u.Devices[0].Taken / kib64, u.Devices[1].Taken / kib64}
		// The system may take a moment to clear away a killed process.
		if len(u.Processes) == living && taken == want || time.Now().After(end) {
			break
		}
	}
	require.Equal(h.t, want, taken, "%s: %v", h.at, u)
	require.Empty(h.t, u.Exported, "%s: %v", h.at, u)
}

// Tenants hand one device to each other, and one of each two is killed: at every driver call of a
// suspension and of a resume, and at any moment. The others go on with their bytes, the memory of
// the dead is free, and nothing is left.
func TestTenantsThatAreKilled(t *testing.T) {
	rounds, stride := 24, 7
	if n, err := strconv.Atoi(os.Getenv("CUVMM_KILL_ROUNDS")); err == nil {
		rounds, stride = n, 1
	}
	h := &house{t: t, folder: filepath.Join(t.TempDir(), "machine"), counted: map[string]int{}, atAny: map[string]int{}, calls: map[string]int{}}
	for range 3 {
		h.all = append(h.all, &tenant{})
	}
	h.moveIn()
	for range h.all { // which counts the calls
		to := h.next()
		h.tell(h.awake, "suspend")
		h.tell(to, "resume")
		h.awake = to
	}
	for round := range rounds {
		var random *rand.Rand
		if round%4 > 1 {
			random = rand.New(rand.NewPCG(uint64(round), 5))
		}
		kill := []string{"suspend", "resume"}[round%2]
		h.at = fmt.Sprintf("round %d, killed at calls %v of %v, at any moment %v, now in %s", round, h.counted, h.calls, h.atAny, kill)
		h.handOver(kill, stride, random)
		h.check()
		h.moveIn()
	}
	t.Log(h.at)
	for _, x := range h.all {
		h.tell(x, "end")
		x.cmd.Wait()
		x.cmd = nil
	}
	h.awake = nil
	h.check()
	files, err := os.ReadDir(h.folder)
	require.NoError(t, err)
	require.Len(t, files, 1, "only the machine")
}
