//go:build linux

package publish_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// task is what a test tells a child to do, and outcome the result.
type task struct {
	Do      string
	N, From int
	Name    string
	Wait    time.Duration
}

type outcome struct {
	Len        int
	Generation uint64
	Ptr        uint64
	Sum        string
	Err        string
	// Is names the sentinels that the error matches.
	Is    []string
	Stats publish.Stats
	FDs   int
	Maps  int
	Told  []int
}

var sentinels = map[string]error{
	"gone": peer.ErrGone, "withdrawn": publish.ErrWithdrawn, "unfinished": publish.ErrUnfinished, "capacity": cuda.ErrCapacity,
	"closed": cuda.ErrClosed, "timeout": peer.ErrTimeout, "unknown": publish.ErrUnknown, "refused": peer.ErrRefused,
	"in use": cuda.ErrInUse, "capturing": cuda.ErrCapturing, "protocol": peer.ErrProtocol,
}

func (r *outcome) fail(err error) {
	if err == nil {
		return
	}
	r.Err = err.Error()
	for name, s := range sentinels {
		if errors.Is(err, s) {
			r.Is = append(r.Is, name)
		}
	}
	slices.Sort(r.Is)
}

// place is where the processes of a test meet.
type place struct {
	Folder string // of the software machine; empty: the real driver
	Dir    string // of the socket
	Memory int    // of the software machine's device; 0 is its default
	// Quiet processes cannot be traced, Small ones may open 1,024 files, and
	// Stranger is an ordinary user.
	Quiet, Small, Stranger bool
}

func (p place) socket() string { return filepath.Join(p.Dir, "s") }

// places runs a test on each driver, the device being this process's own.
func places(t *testing.T, test func(t *testing.T, p place, d *cuda.Device)) {
	t.Run("software", func(t *testing.T) {
		p := newPlace(t)
		_, s := sim.Open(t, sim.Options{Folder: p.Folder})
		test(t, p, s.Devices()[0])
	})
	t.Run("real", func(t *testing.T) {
		test(t, place{Dir: filepath.Join(t.TempDir(), "d")}, gputest.Real(t))
	})
}

func newPlace(t testing.TB) place {
	t.Helper()
	return place{Folder: filepath.Join(t.TempDir(), "machine"), Dir: filepath.Join(t.TempDir(), "d")}
}

// machine describes the software machine.
func (p place) machine() sim.Options {
	return sim.Options{Folder: p.Folder, Devices: []sim.DeviceOptions{{Memory: p.Memory}}}
}

// open is the child's device.
func (p place) open() (*cuda.System, *cuda.Device, error) {
	sys, _, err := p.openMachine()
	if err != nil {
		return nil, nil, err
	}
	return sys, sys.Devices()[0], nil
}

// openMachine is open with the software machine, which is nil on the real driver.
func (p place) openMachine() (sys *cuda.System, m *sim.Machine, err error) {
	if p.Small {
		err = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1024, Max: 1024})
	}
	if p.Stranger && err == nil {
		err = peertest.Become(peertest.Unprivileged)
	}
	if p.Quiet && err == nil {
		err = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	}
	if err != nil {
		return nil, nil, err
	}
	if p.Folder == "" {
		sys, err = cuda.Open(cuda.Options{})
	} else if m, err = sim.New(p.machine()); err == nil {
		sys, err = m.OpenOwned(cuda.Options{TraceLeaks: true})
	}
	return sys, m, err
}

func init() {
	// A follower takes orders: follower FOLDER DIR [RESERVE].
	reexec.Register("follower", func(c *reexec.Child) error {
		var p place
		var o publish.FollowOptions
		if err := c.Recv(&p); err != nil {
			return err
		}
		if err := c.Recv(&o.Reserve); err != nil {
			return err
		}
		return follow(c, p, o)
	})
	reexec.Register("publisher", func(c *reexec.Child) error {
		var p place
		if err := c.Recv(&p); err != nil {
			return err
		}
		return publishes(c, p)
	})
}

func follow(c *reexec.Child, p place, o publish.FollowOptions) (err error) {
	sys, d, err := p.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	ctx := context.Background() // reexec bounds the child's life
	var conn *peer.Conn
	if len(c.Files) > 0 {
		conn, err = peer.Inherit(c.Files[0], peer.Options{})
	} else {
		conn, err = peer.Dial(ctx, p.socket(), peer.Options{})
	}
	if err != nil {
		return err
	}
	k := publish.NewClient(conn)
	defer func() { err = errors.Join(err, k.Close()) }()
	s, err := d.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	var mu sync.Mutex
	told := []int{}
	o.Quiesce = func(length int) []*cuda.Stream {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, length)
		return []*cuda.Stream{s}
	}
	f, err := publish.Follow[uint32](ctx, k, d, "numbers", o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for {
		var do task
		if c.Recv(&do) != nil {
			return nil
		}
		var r outcome
		limited, cancel := context.WithTimeout(ctx, cmpOr(do.Wait, peertest.Guard))
		switch do.Do {
		case "next":
			r.fail(f.Next(limited, s))
		case "until":
			for err == nil && f.Len() != do.N {
				err = f.Next(limited, s)
			}
			r.fail(err)
			err = nil
		case "arrived":
			r.fail(f.Next(limited))
		case "sum":
			all := make([]uint32, f.Len())
			if err := f.Array().All().CopyTo(s, all); err != nil {
				r.fail(err)
			}
			r.Sum = sumOf(all)
		case "check": // every generation, until the end
			r.fail(checkAll(limited, f, s))
			mu.Lock()
			r.Told = slices.Clone(told)
			mu.Unlock()
		case "write":
			part, err := f.Array().Slice(do.From, do.From+do.N)
			if err == nil {
				err = part.CopyFrom(nil, counting(do.From, do.N))
			}
			r.fail(err)
		case "err":
			r.fail(f.Err())
		case "synchronize":
			r.fail(s.Synchronize())
		case "gone":
			for f.Err() == nil && limited.Err() == nil {
				time.Sleep(time.Millisecond)
			}
			r.fail(f.Err())
		case "close":
			r.fail(f.Close())
		case "told":
			mu.Lock()
			r.Told = slices.Clone(told)
			mu.Unlock()
		}
		cancel()
		r.Len, r.Generation, r.Ptr = f.Len(), f.Generation(), uint64(f.Array().Ptr())
		if err := c.Send(r); err != nil {
			return err
		}
	}
}

func cmpOr(a, b time.Duration) time.Duration {
	if a != 0 {
		return a
	}
	return b
}

// checkAll follows an array of which element i is i, to its end.
func checkAll(ctx context.Context, f *publish.Follower[uint32], s *cuda.Stream) error {
	for {
		err := f.Next(ctx, s)
		if errors.Is(err, cuda.ErrCapacity) {
			continue
		}
		if err != nil {
			return err
		}
		all := f.Array().All()
		got := make([]uint32, all.Len())
		if err := all.CopyTo(s, got); err != nil {
			if f.Len() < len(got) {
				continue // taken back meanwhile
			}
			return err
		}
		for i, v := range got {
			if v != uint32(i) && i < f.Len() {
				return fmt.Errorf("element %d of %d is %d in generation %d", i, len(got), v, f.Generation())
			}
		}
	}
}

// sumOf is the SHA-256 of elements.
func sumOf(all []uint32) string {
	b := make([]byte, 0, 4*len(all))
	for _, v := range all {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	return fmt.Sprintf("%x", sha256.Sum256(b))
}

// stuck is work on a stream that ends when the word is written: on both drivers.
func stuck(d *cuda.Device, s *cuda.Stream, word cuda.HostSlice) error {
	c, err := core.ContextOf("test", d)
	if err != nil {
		return err
	}
	clear(word.Bytes())
	drv := c.System().Drv
	at, r := drv.MemHostGetDevicePointer(c.Handle, unsafePointer(word.Bytes()))
	if r == driver.Success {
		r = drv.StreamWaitValue64(c.Handle, driver.Stream(s.Handle()), at, 1)
	}
	if r != driver.Success {
		return fmt.Errorf("%v", r)
	}
	return nil
}

func publishes(c *reexec.Child, p place) (err error) {
	sys, d, err := p.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	l, err := peer.Listen(p.Dir, "s", peer.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	server := publish.NewServer(publish.ServerOptions{})
	served := make(chan error, 1)
	go func() { served <- server.Serve(context.Background(), l) }()
	defer func() { err = errors.Join(err, server.Close(), <-served) }()
	a, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 4096 * mib, Chunks: vmm.FixedChunks(2 * mib)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.Close()) }()
	pub, err := publish.Array(server, "numbers", a)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pub.Withdraw()) }()
	s, err := d.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	word, err := d.NewHostBuffer(8)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close(), word.Close()) }()
	if err := c.Send("ready"); err != nil {
		return err
	}
	for {
		var do task
		if c.Recv(&do) != nil {
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), cmpOr(do.Wait, peertest.Guard))
		var r outcome
		switch do.Do {
		case "append": // and announce
			_, err := a.Append(s, counting(do.From, do.N))
			if err == nil {
				err = pub.Announce(ctx, a.Len(), s)
			}
			r.fail(err)
		case "grow": // and announce
			_, err := a.AppendUndefined(do.N)
			if err == nil {
				err = pub.Announce(ctx, a.Len(), s)
			}
			r.fail(err)
		case "extend": // as it would be without any shrink between, and announce
			_, err := a.Append(s, counting(a.Len(), do.N))
			if err == nil {
				err = pub.Announce(ctx, a.Len(), s)
			}
			r.fail(err)
		case "shrink":
			r.fail(pub.Shrink(do.N, s))
		case "settle":
			r.fail(pub.Settle(ctx))
		case "drain":
			r.fail(sys.Drain(ctx))
		case "stuck":
			r.fail(stuck(d, s, word.All()))
		case "free":
			word.Bytes()[0] = 1
		case "withdraw":
			r.fail(pub.Withdraw())
		case "followers":
			for len(pub.Stats().Followers) != do.N && ctx.Err() == nil {
				time.Sleep(time.Millisecond)
			}
			r.fail(ctx.Err())
		case "sum":
			all := make([]uint32, a.Len())
			r.fail(a.All().CopyTo(s, all))
			r.Sum = sumOf(all)
		}
		cancel()
		r.Len, r.Stats, r.Ptr = a.Len(), pub.Stats(), uint64(a.Ptr())
		r.FDs, r.Maps = filesOpen(), mappings()
		if err := c.Send(r); err != nil {
			return err
		}
	}
}

func filesOpen() int { return len(peertest.OwnFiles()) + peer.OpenFDs() }

// mappings counts those of shared memory: the runtime's own come and go.
func mappings() int {
	all, _ := os.ReadFile("/proc/self/maps")
	n := 0
	for line := range bytes.Lines(all) {
		if f := bytes.Fields(line); len(f) > 1 && bytes.HasSuffix(f[1], []byte("s")) {
			n++
		}
	}
	return n
}

// member is a child that takes orders.
type member struct {
	*reexec.Cmd
	t testing.TB
}

// ask has a child do something, which must succeed.
func (m member) ask(do task) outcome {
	m.t.Helper()
	r := m.try(do)
	require.Empty(m.t, r.Err, "%+v", do)
	return r
}

func (m member) try(do task) (r outcome) {
	m.t.Helper()
	m.Send(do)
	m.Recv(&r)
	return r
}

func startPublisher(t testing.TB, p place) member {
	t.Helper()
	c := reexec.Command(t, "publisher")
	c.Start()
	c.Send(p)
	var ready string
	c.Recv(&ready)
	return member{c, t}
}

func startFollower(t testing.TB, p place, reserve int) member {
	t.Helper()
	c := reexec.Command(t, "follower")
	c.Start()
	c.Send(p)
	c.Send(reserve)
	return member{c, t}
}

func TestAnArrayIsFollowedByOtherProcesses(t *testing.T) {
	places(t, func(t *testing.T, p place, _ *cuda.Device) {
		p.Quiet = true
		publisher := startPublisher(t, p)
		followers := []member{startFollower(t, p, 0), startFollower(t, p, 0)}
		for i := range 4 {
			publisher.ask(task{Do: "append", From: i * 300_000, N: 300_000})
			want := publisher.ask(task{Do: "sum"})
			for _, f := range followers {
				f.ask(task{Do: "until", N: want.Len})
				got := f.ask(task{Do: "sum"})
				require.Equal(t, want.Sum, got.Sum)
			}
		}
		publisher.ask(task{Do: "shrink", N: 100_000})
		publisher.ask(task{Do: "settle"})
		want := publisher.ask(task{Do: "sum"})
		require.Zero(t, want.Stats.Pinned)
		for _, f := range followers {
			f.ask(task{Do: "until", N: 100_000})
			require.Equal(t, want.Sum, f.ask(task{Do: "sum"}).Sum)
			require.Equal(t, []int{100_000}, f.ask(task{Do: "told"}).Told)
			f.ask(task{Do: "close"})
			f.Wait()
		}
		publisher.ask(task{Do: "followers", N: 0})
		publisher.Wait()
		if p.Folder != "" {
			u, err := sim.Inspect(p.Folder)
			require.NoError(t, err)
			require.Zero(t, u.Devices[0].Taken)
			require.Empty(t, u.Exported)
		}
	})
}

// A follower keeps what it has when the publisher is killed, is told, and what
// was announced behind work that was never done is not shown.
func TestAPublisherThatIsKilledLeavesNoFollowerHanging(t *testing.T) {
	places(t, func(t *testing.T, p place, _ *cuda.Device) {
		publisher := startPublisher(t, p)
		f := startFollower(t, p, 0)
		publisher.ask(task{Do: "append", N: 1_000_000})
		sum := publisher.ask(task{Do: "sum"}).Sum
		f.ask(task{Do: "until", N: 1_000_000})
		f.ask(task{Do: "synchronize"})
		publisher.ask(task{Do: "stuck"})
		publisher.ask(task{Do: "append", From: 5, N: 1_000_000})
		require.Equal(t, 2_000_000, f.ask(task{Do: "next"}).Len, "shown to whoever is ordered behind it")
		require.Equal(t, []string{"timeout"}, f.try(task{Do: "next", Wait: 20 * time.Millisecond}).Is)
		// The follower's stream waits for the publisher's when that is killed.
		f.Send(task{Do: "synchronize"})
		time.Sleep(50 * time.Millisecond)
		require.NoError(t, publisher.Process.Signal(unix.SIGKILL))
		var r outcome
		f.Recv(&r)
		require.Empty(t, r.Err)
		gone := f.try(task{Do: "gone"})
		require.Equal(t, []string{"gone", "unfinished"}, gone.Is)
		require.Equal(t, 1_000_000, gone.Len)
		require.Equal(t, []string{"gone", "unfinished"}, f.try(task{Do: "next"}).Is)
		require.Equal(t, sum, f.ask(task{Do: "sum"}).Sum, "what is mapped stays")
		f.ask(task{Do: "close"})
		f.Wait()

		// Both start again at the same place.
		publisher = startPublisher(t, p)
		f = startFollower(t, p, 0)
		publisher.ask(task{Do: "append", From: 3, N: 1000})
		f.ask(task{Do: "until", N: 1000})
		require.Equal(t, publisher.ask(task{Do: "sum"}).Sum, f.ask(task{Do: "sum"}).Sum)
		f.Wait()
		publisher.Wait()
	})
}

// taken is what is taken of the machine, as a third process sees it.
func (p place) taken(t testing.TB) (bytes int) {
	u, err := sim.Inspect(p.Folder)
	require.NoError(t, err)
	for _, d := range u.Devices {
		bytes += d.Taken
	}
	return bytes
}

// Followers that crash, again and again and while memory is announced, cost the
// publisher and each other nothing.
func TestTwoHundredFollowersCrash(t *testing.T) {
	p := newPlace(t)
	publisher := startPublisher(t, p)
	steady := startFollower(t, p, 0)
	publisher.ask(task{Do: "append", N: 1_000_000})
	steady.ask(task{Do: "until", N: 1_000_000})
	const rounds, at = 10, 20
	var before outcome
	for round := range rounds {
		var all []member
		for range at {
			all = append(all, startFollower(t, p, 0))
		}
		for i, f := range all {
			// Some die as they come, some while memory is on its way, some with it. In
			// the first round all have come, so that none later needs more than they.
			switch {
			case round == 0 || i%3 == 2:
				f.ask(task{Do: "until", N: 1_000_000})
			case i%3 == 1:
				f.Send(task{Do: "until", N: 1_000_000})
			}
		}
		for i, f := range all {
			if i%5 == 0 {
				publisher.Send(task{Do: "append", N: 600_000}) // another chunk for all
			}
			f.Kill()
			if i%5 == 4 {
				var r outcome
				publisher.Recv(&r)
				require.Empty(t, r.Err)
			}
		}
		publisher.ask(task{Do: "followers", N: 1})
		publisher.ask(task{Do: "shrink", N: 1_000_000})
		publisher.ask(task{Do: "settle"})
		require.Eventually(t, func() bool {
			u, err := sim.Inspect(p.Folder)
			require.NoError(t, err)
			shared := len(u.Processes) == 2 && len(u.Exported) == 2
			open := 0
			for _, mem := range u.Exported {
				shared = shared && len(mem.Holders) == 2
				if mem.Open {
					open++
				}
			}
			return shared && open == 1
		}, peertest.Guard, time.Millisecond, "two chunks are shown, two processes have them, and the publisher keeps one descriptor")
		r := publisher.ask(task{Do: "drain"})
		if round == 0 {
			before = r
			continue
		}
		require.Eventually(t, func() bool {
			r = publisher.ask(task{Do: "drain"})                   // one that came and died may have been accepted just now
			return r.FDs == before.FDs && r.Maps <= before.Maps+64 // pages go that many at a time
		}, peertest.Guard, 10*time.Millisecond, "descriptors or address space of the dead are left")
	}
	publisher.ask(task{Do: "append", From: 7, N: 100_000})
	steady.ask(task{Do: "until", N: 1_100_000})
	require.Equal(t, publisher.ask(task{Do: "sum"}).Sum, steady.ask(task{Do: "sum"}).Sum)
	publisher.ask(task{Do: "shrink", N: 500_000})
	publisher.ask(task{Do: "settle"})
	// The goroutines that send to the followers release what they sent in their own time.
	require.Eventually(t, func() bool { return p.taken(t)/mib == 2 }, peertest.Guard, time.Millisecond, "the memory of one chunk, which two processes have")
	steady.Kill()
	publisher.Wait()
	require.Eventually(t, func() bool { return p.taken(t) == 0 }, peertest.Guard, time.Millisecond)
}

// Both sides may open 1,024 files, and share more chunks than that.
func TestPublishingUnderASmallLimitOfOpenFiles(t *testing.T) {
	p := newPlace(t)
	p.Small = true
	publisher := startPublisher(t, p)
	f := startFollower(t, p, 0)
	publisher.ask(task{Do: "grow", N: 1100 * mib / 2})
	f.ask(task{Do: "until", N: 1100 * mib / 2})
	publisher.ask(task{Do: "settle"})
	// Followers acknowledge before the publisher has closed what it sent.
	require.Eventually(t, func() bool { return publisher.ask(task{Do: "settle"}).FDs < 60 }, peertest.Guard, time.Millisecond)
	f.Wait()
	publisher.Wait()
	require.Zero(t, p.taken(t))
}

// Under load each side sees only whole generations, whatever the other is at.
func TestGrowthAndShrinkageUnderLoad(t *testing.T) {
	places(t, func(t *testing.T, p place, _ *cuda.Device) {
		publisher := startPublisher(t, p)
		var followers []member
		for i := range 3 {
			f := startFollower(t, p, []int{0, 32 * mib, 6 * mib}[i])
			f.Send(task{Do: "check", Wait: peertest.Guard})
			followers = append(followers, f)
		}
		publisher.ask(task{Do: "followers", N: 3})
		for i := range 60 {
			n := publisher.ask(task{Do: "extend", N: 150_000 + 1000*i}).Len
			if i%7 == 6 {
				publisher.ask(task{Do: "shrink", N: n / 5})
			}
		}
		publisher.ask(task{Do: "shrink", N: 1_000})
		r := publisher.ask(task{Do: "settle"})
		require.Zero(t, r.Stats.Pinned)
		publisher.ask(task{Do: "withdraw"})
		for _, f := range followers {
			var r outcome
			f.Recv(&r)
			require.Equal(t, []string{"withdrawn"}, r.Is, r.Err)
			require.Equal(t, 1_000, r.Len)
			require.NotEmpty(t, r.Told)
			f.Wait()
		}
		publisher.Wait()
		if p.Folder != "" {
			require.Zero(t, p.taken(t))
		}
	})
}

// A process of another user gets nothing, and the others get everything.
func TestAFollowerOfAnotherUser(t *testing.T) {
	peertest.NeedRoot(t)
	p := newPlace(t)
	publisher := startPublisher(t, p)
	stranger := p
	stranger.Stranger, stranger.Folder = true, ""
	c := reexec.Command(t, "stranger")
	c.Start()
	c.Send(stranger)
	c.Wait()
	f := startFollower(t, p, 0)
	publisher.ask(task{Do: "append", N: 1000})
	f.ask(task{Do: "until", N: 1000})
	f.Wait()
	publisher.Wait()
}

func init() {
	// stranger is another user, even where the folders would let it in.
	reexec.Register("stranger", func(c *reexec.Child) error {
		var p place
		if err := c.Recv(&p); err != nil {
			return err
		}
		dir, err := unix.Open(p.Dir, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		if err := peertest.Become(peertest.Unprivileged); err != nil {
			return err
		}
		if _, err := peer.Dial(context.Background(), p.socket(), peer.Options{}); !errors.Is(err, cuda.ErrNotPermitted) {
			return fmt.Errorf("dial: %w", err)
		}
		// The directory is open already, so only the server itself can refuse.
		s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		_ = unix.Connect(s, &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d/s", dir)})
		b := make([]byte, 1024)
		n, _ := unix.Read(s, b)
		if n > 0 && !bytes.Contains(b[:n], []byte("not allowed")) {
			return fmt.Errorf("the server says %q", b[:n])
		}
		return nil
	})
}
