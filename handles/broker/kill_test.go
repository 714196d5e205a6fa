//go:build linux

package broker_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/testlog"
	"github.com/stretchr/testify/require"
)

const kib64 = 64 << 10

// machine is the software machine in a folder, which all processes of the test share.
func machine(folder string) sim.Options {
	return sim.Options{Folder: folder, Devices: []sim.DeviceOptions{{Granularity: kib64, Memory: 256 * mib}}}
}

func open(folder string) (*cuda.System, error) {
	m, err := sim.New(machine(folder))
	if err != nil {
		return nil, err
	}
	return m.OpenOwned(cuda.Options{})
}

// serveRole is a broker that a keeper runs.
func serveRole(args []string) error {
	ending := make(chan os.Signal, 1)
	signal.Notify(ending, syscall.SIGTERM)
	c, err := peer.Inherit(os.NewFile(3, "keeper"), peer.Options{MaxFDs: 4096})
	if err != nil {
		return err
	}
	l, err := peer.InheritListener(os.NewFile(4, "socket"), peer.Options{})
	if err != nil {
		return err
	}
	sys, err := open(args[0])
	if err != nil {
		return err
	}
	ctx := context.Background()
	b, err := broker.New(ctx, sys, broker.Options{Keeper: keeper.NewClient(c), Return: time.Second})
	if err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() { served <- b.Serve(ctx, l) }()
	if err := os.WriteFile(args[1], []byte(strconv.Itoa(os.Getpid())), 0o600); err != nil {
		return err
	}
	select {
	case err := <-served:
		return err
	case <-ending:
	}
	return errors.Join(b.Close(), sys.Close())
}

// deed is what a client says before it does something, and once it has done it.
type deed struct {
	Did  bool
	Seed int
}

// clientRole writes versions of an object of its own, and reads those of all clients, until its input
// ends: client FOLDER SOCKET NUMBER CLIENTS SEED.
func clientRole(args []string) error {
	var n [3]int
	for i := range n {
		var err error
		if n[i], err = strconv.Atoi(args[2+i]); err != nil {
			return err
		}
	}
	sys, err := open(args[0])
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	var over atomic.Bool
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		over.Store(true)
		time.AfterFunc(time.Minute, func() { os.Exit(1) }) // the test is gone, and its broker
	}()
	defer cancel()
	d := sys.Devices()[0]
	k, err := broker.Dial(ctx, args[1], broker.DialOptions{Wait: true, ComeBack: publish.ComeBack{Most: 50 * time.Millisecond}})
	if err != nil {
		return err
	}
	r := rand.New(rand.NewPCG(uint64(os.Getpid()), uint64(n[2])))
	say := json.NewEncoder(os.Stdout)
	x := &worker{ctx: ctx, k: k, d: d, r: r, seen: map[string]int{}}
	own := "w" + strconv.Itoa(n[0])
	for seed := n[2]; !over.Load(); {
		var err error
		switch at := r.IntN(10); {
		case at < 4:
			if err = say.Encode(deed{Seed: seed}); err == nil {
				var did bool
				if did, err = x.write(own, seed); err == nil && did {
					err = say.Encode(deed{Did: true, Seed: seed})
				}
			}
			seed++
		case at < 8:
			err = x.read("w"+strconv.Itoa(r.IntN(n[1])), broker.AttachOptions{Wait: r.IntN(2) == 0})
		case at < 9:
			err = x.ensure("shared", 1e6*(n[0]+1)+seed)
		default:
			err = k.Remove(ctx, "shared", 0)
		}
		if err != nil && !errors.Is(err, broker.ErrUnknown) && !errors.Is(err, broker.ErrWriting) {
			return fmt.Errorf("seed %d: %w", seed, err)
		}
	}
	return errors.Join(x.closeAll(), k.Close(), sys.Close())
}

// worker does what clients do.
type worker struct {
	ctx  context.Context
	k    *broker.Client
	d    *cuda.Device
	r    *rand.Rand
	seen map[string]int // the highest seed of a name
	held []*broker.Object
}

// contents are those of an object with a seed, which tell it.
func contents(seed int) []byte {
	data := pattern(kib64*(1+seed%5), seed)
	binary.LittleEndian.PutUint64(data, uint64(seed))
	return data
}

func (x *worker) write(name string, seed int) (did bool, err error) {
	w, err := x.k.Create(x.ctx, x.d, name, broker.CreateOptions{Bytes: len(contents(seed))})
	if err != nil {
		return false, err
	}
	o, err := x.finish(w, seed)
	if o == nil || err != nil {
		return false, err
	}
	return true, x.keep(o)
}

func (x *worker) finish(w *broker.Writer, seed int) (*broker.Object, error) {
	if err := fill(w.Buffer(), contents(seed)); err != nil {
		return nil, err
	}
	if x.r.IntN(10) == 0 {
		return nil, w.Close()
	}
	o, err := w.Commit(x.ctx, nil)
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return o, nil
}

// keep holds an object for a while.
func (x *worker) keep(o *broker.Object) error {
	x.held = append(x.held, o)
	if len(x.held) < 5 {
		return nil
	}
	at := x.r.IntN(len(x.held))
	old := x.held[at]
	x.held = slices.Delete(x.held, at, at+1)
	return old.Close()
}

func (x *worker) closeAll() (err error) {
	for _, o := range x.held {
		err = errors.Join(err, o.Close())
	}
	return err
}

// check returns an object's seed, if it has what was written with that, whole.
func check(o *broker.Object) (int, error) {
	b := o.Buffer()
	got := make([]byte, b.Len())
	part, err := b.Slice(0, b.Len())
	if err == nil {
		err = part.CopyTo(nil, got)
	}
	if err != nil {
		return 0, err
	}
	seed := int(binary.LittleEndian.Uint64(got))
	if seed < 0 || seed > 1e8 || !bytes.Equal(got, contents(seed)) {
		return 0, fmt.Errorf("object %+v has bytes that nobody wrote whole, of seed %d", o.About(), seed)
	}
	return seed, nil
}

func (x *worker) read(name string, o broker.AttachOptions) error {
	got, err := x.k.Attach(x.ctx, x.d, name, o)
	if err != nil {
		return err
	}
	seed, err := check(got)
	if err == nil && seed < x.seen[name] {
		err = fmt.Errorf("%q has seed %d after %d", name, seed, x.seen[name])
	}
	x.seen[name] = seed
	return errors.Join(err, x.keep(got))
}

func (x *worker) ensure(name string, seed int) error {
	got, err := x.k.Ensure(x.ctx, x.d, name, broker.CreateOptions{Bytes: len(contents(seed)), Ephemeral: seed%2 == 0}, func(_ context.Context, w *broker.Writer) (*broker.Object, error) {
		o, err := x.finish(w, seed)
		if err == nil && o == nil {
			err = broker.ErrWriting // gave it up
		}
		return o, err
	})
	switch {
	case errors.Is(err, broker.ErrLost):
		return nil // it was committed, and removed before this client learned of it from the next broker
	case err != nil:
		return err
	}
	_, err = check(got)
	return errors.Join(err, x.keep(got))
}

// client is a client's process, which the test kills, and what it said.
type client struct {
	cmd  *exec.Cmd
	in   io.Closer
	log  *testlog.Log
	said sync.WaitGroup

	mu        sync.Mutex
	will, did int
}

func (c *client) listen(r io.Reader) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		var x deed
		if json.Unmarshal(lines.Bytes(), &x) != nil {
			continue // cut off by a kill
		}
		c.mu.Lock()
		c.will = x.Seed
		if x.Did {
			c.did = x.Seed
		}
		c.mu.Unlock()
	}
}

// done is the latest that it did.
func (c *client) done() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.did
}

// Clients and brokers die at random moments. What was committed is there, whole, and the newest; what
// was not is never seen; and nothing is left over.
func TestKills(t *testing.T) {
	peertest.NoLeak(t)
	folder := t.TempDir()
	l, err := peer.Listen(t.TempDir()+"/s", "broker", peer.Options{})
	require.NoError(t, err)
	k := keeper.New()
	ctx, stop := context.WithCancel(t.Context())
	kept := make(chan error, 1)
	number := t.TempDir() + "/pid"
	brokers := testlog.Log{}
	f, err := l.File()
	require.NoError(t, err)
	go func() {
		kept <- k.Run(ctx, keeper.RunOptions{Command: func() *exec.Cmd {
			c := as("broker", folder, number)
			c.ExtraFiles = []*os.File{f}
			c.Stderr = &brokers
			return c
		}})
	}()
	const clients = 4
	seeds := make([]int, clients) // the highest that may have been committed
	least := make([]int, clients) // the highest that was
	start := func(i int) *client {
		c := &client{cmd: as("client", folder, l.Path(), strconv.Itoa(i), strconv.Itoa(clients), strconv.Itoa(seeds[i]+1)), log: &testlog.Log{}}
		c.cmd.Stderr = c.log
		in, err := c.cmd.StdinPipe()
		require.NoError(t, err)
		out, err := c.cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, c.cmd.Start())
		c.in = in
		c.said.Go(func() { c.listen(out) })
		return c
	}
	end := func(i int, c *client, kill bool) {
		if kill {
			_ = c.cmd.Process.Kill()
		}
		_ = c.in.Close()
		c.said.Wait()
		err := c.cmd.Wait()
		if !kill {
			require.NoError(t, err, c.log.String())
		} else if x := new(exec.ExitError); errors.As(err, &x) {
			require.True(t, x.Sys().(syscall.WaitStatus).Signaled(), "it had failed before: %s", c.log.String())
		}
		seeds[i], least[i] = max(seeds[i], c.will), max(least[i], c.did)
	}
	all := make([]*client, clients)
	for i := range all {
		all[i] = start(i)
	}
	r := rand.New(rand.NewPCG(1, 2))
	killed, brokersKilled := 0, 0
	killBroker := func() {
		text, err := os.ReadFile(number)
		if err != nil || len(text) == 0 {
			return // the next has not begun
		}
		pid, err := strconv.Atoi(string(text))
		require.NoError(t, err)
		how := []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM}[r.IntN(2)]
		if syscall.Kill(pid, how) == nil {
			brokersKilled++
		}
		_ = os.Remove(number) // until the next has written its own
	}
	killClient := func(i int) {
		end(i, all[i], true)
		all[i] = start(i)
		killed++
	}
	for round := range rounds() {
		time.Sleep(time.Duration(r.IntN(60)) * time.Millisecond)
		switch {
		case round%40 == 39: // all but the keeper, at once
			killBroker()
			for _, c := range all {
				_ = c.cmd.Process.Kill()
			}
			for i := range all {
				killClient(i)
			}
		case r.IntN(3) == 0:
			killBroker()
		default:
			killClient(r.IntN(clients))
		}
		if round%200 == 199 { // a broker that lives long enough ends what nobody came back for
			require.Eventually(t, func() bool { return k.Len() <= clients*8 }, peertest.Guard, 10*time.Millisecond)
		}
	}
	for i, c := range all {
		require.Eventually(t, func() bool { return max(least[i], c.done()) > 0 }, peertest.Guard, time.Millisecond, "client %d does something", i)
		end(i, c, false)
	}
	t.Logf("%d brokers and %d clients were killed; seeds %v, of which %v were committed", brokersKilled, killed, seeds, least)
	require.Positive(t, brokersKilled)

	sys, err := open(folder)
	require.NoError(t, err)
	d := sys.Devices()[0]
	b, err := broker.Dial(peertest.Context(t), l.Path(), broker.DialOptions{Wait: true})
	require.NoError(t, err)
	for i := range clients {
		name := "w" + strconv.Itoa(i)
		o, err := b.Attach(peertest.Context(t), d, name, broker.AttachOptions{Wait: true})
		require.NoError(t, err)
		seed, err := check(o)
		require.NoError(t, err)
		require.GreaterOrEqual(t, seed, least[i], "what was committed is there")
		require.LessOrEqual(t, seed, seeds[i])
		require.NoError(t, o.Close())
		require.NoError(t, b.Remove(peertest.Context(t), name, 0))
	}
	empty, err := open(t.TempDir())
	require.NoError(t, err)
	alone := used(t, empty) // what a context takes
	require.NoError(t, empty.Close())
	var left string
	for until := time.Now().Add(8 * time.Second); ; time.Sleep(10 * time.Millisecond) { // what nobody came back for, too
		if err := b.Remove(peertest.Context(t), "shared", 0); err != nil && !errors.Is(err, broker.ErrWriting) { // until its killed writer is missed
			require.ErrorIs(t, err, broker.ErrUnknown)
		}
		listed, err := b.List(peertest.Context(t))
		require.NoError(t, err, left)
		taken := used(t, sys)
		left = fmt.Sprintf("%+v, %d entries, %d bytes", listed, k.Len(), taken)
		if len(listed) == 0 && k.Len() <= 1 && taken == alone {
			break
		}
		require.True(t, time.Now().Before(until), left)
	}
	require.NoError(t, b.Close())
	require.NoError(t, sys.Close())
	stop()
	require.NoError(t, <-kept)
	require.NotContains(t, brokers.String(), "DATA RACE")
	require.NoError(t, f.Close())
	require.NoError(t, l.Close())
	require.NoError(t, k.Close())
}

func used(t testing.TB, sys *cuda.System) int {
	free, total, err := sys.Devices()[0].MemoryInfo()
	require.NoError(t, err)
	return total - free
}

// rounds is how often something is killed; CUVMM_KILL_ROUNDS says otherwise.
func rounds() int {
	if n, err := strconv.Atoi(os.Getenv("CUVMM_KILL_ROUNDS")); err == nil {
		return n
	}
	return 80
}
