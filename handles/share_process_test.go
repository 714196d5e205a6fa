//go:build linux

package handles_test

import (
	"bytes"
	"context"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// order is a command to a child of these tests, and report its reply.
type order struct {
	Do           string
	Path         string // of a socket
	N, Seed      int    // bytes and their pattern
	Chunk        int    // bytes
	Nth          int    // buffer
	ReadOnly     bool
	Keep         bool   // descriptors
	Spots        bool   // a few bytes here and there alone
	Folder       string // of the software machine; empty for the real driver
	Memory       int    // of its device
	Fast         bool   // without leak tracing
	Costs        bool   // the calls take as long as on a GPU
	Quiet, Small bool   // run as an ordinary user that cannot be traced; have few open files
}

type report struct {
	Err string
	Len int
	Sum uint32
	Ptr uint64
	// Open descriptors, and live allocations.
	FDs, Live int
	Nanos     int64
	At        int64 // when a receive returned, by the clock of all processes
}

// party is a child: it has a device, connections in turn, and buffers.
type party struct {
	s       *cuda.System
	d       *cuda.Device
	conn    *peer.Conn
	l       *peer.Listener
	file    *os.File
	buffers []*vmm.Buffer
}

func init() {
	reexec.Register("party", func(c *reexec.Child) error {
		p := &party{}
		if len(c.Files) > 0 {
			p.file = c.Files[0]
		}
		for {
			var o order
			if err := c.Recv(&o); errors.Is(err, io.EOF) {
				return p.close()
			} else if err != nil {
				return err
			}
			var r report
			if err := p.obey(o, &r); err != nil {
				r.Err = err.Error()
			}
			if err := c.Send(r); err != nil {
				return err
			}
		}
	})
}

func (p *party) obey(o order, r *report) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), peertest.Guard)
	defer cancel()
	switch o.Do {
	case "open":
		return p.open(o)
	case "inherit":
		p.conn, err = peer.Inherit(p.file, peer.Options{})
	case "listen":
		p.l, err = peer.Listen(filepath.Dir(o.Path), filepath.Base(o.Path), peer.Options{})
	case "accept":
		p.conn, err = p.l.Accept(ctx)
	case "dial":
		p.conn, err = peer.Dial(ctx, o.Path, peer.Options{})
	case "make":
		b, err := vmm.NewBuffer(p.d, vmm.BufferOptions{Reserve: o.N + o.Chunk, Chunks: vmm.FixedChunks(o.Chunk)})
		if err != nil {
			return err
		}
		p.buffers = append(p.buffers, b)
		if !o.Spots {
			_, err := b.Append(nil, pattern(o.N, o.Seed))
			return err
		}
		if _, err := b.AppendUndefined(o.N); err != nil {
			return err
		}
		return spots(b, func(part vmm.Slice[byte]) error { return part.CopyFrom(nil, pattern(part.Len(), o.Seed)) })
	case "send":
		return handles.SendBuffer(ctx, p.conn, p.buffers[o.Nth])
	case "receive":
		b, err := handles.ReceiveBuffer(ctx, p.conn, p.d, handles.ImportOptions{ReadOnly: o.ReadOnly, KeepDescriptors: o.Keep})
		r.At = peertest.Monotonic()
		if err != nil {
			return err
		}
		p.buffers = append(p.buffers, b)
		r.Ptr = uint64(b.Ptr())
	case "read":
		b := p.buffers[o.Nth]
		if o.Spots {
			return spots(b, func(part vmm.Slice[byte]) error {
				got := make([]byte, part.Len())
				if err := part.CopyTo(nil, got); err != nil || bytes.Equal(got, pattern(len(got), o.Seed)) {
					return err
				}
				return errors.New("other bytes are there")
			})
		}
		got := make([]byte, b.Len())
		part, err := b.Slice(0, b.Len())
		if err != nil {
			return err
		}
		if err := part.CopyTo(nil, got); err != nil {
			return err
		}
		r.Len, r.Sum = len(got), crc32.ChecksumIEEE(got)
	case "write":
		b := p.buffers[o.Nth]
		part, err := b.Slice(0, b.Len())
		if err != nil {
			return err
		}
		return part.CopyFrom(nil, pattern(b.Len(), o.Seed))
	case "close":
		return p.buffers[o.Nth].Close()
	case "import raw":
		took, err := p.importRaw(ctx, o.Chunk)
		r.Nanos = int64(took)
		return err
	case "count":
		r.FDs, r.Live = len(peertest.OwnFiles())+peer.OpenFDs(), p.s.Stats().Allocations
		return nil
	}
	return err
}

// spots calls f with bytes at the beginning, in the middle and at the end.
func spots(b *vmm.Buffer, f func(vmm.Slice[byte]) error) error {
	const n = 1000
	for _, at := range []int{0, b.Len() / 2, b.Len() - n} {
		part, err := b.Slice(at, at+n)
		if err == nil {
			err = f(part)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *party) open(o order) (err error) {
	if o.Quiet {
		if os.Geteuid() == 0 {
			if err := peertest.Become(peertest.Unprivileged); err != nil {
				return err
			}
		}
		if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
			return err
		}
	}
	if o.Small {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1024, Max: 1024}); err != nil {
			return err
		}
	}
	options := cuda.Options{TraceLeaks: true}
	if o.Fast {
		options = cuda.Options{}
	}
	if o.Folder == "" {
		p.s, err = cuda.Open(options)
	} else {
		m, err := sim.New(folderOptions(o.Folder, o.Memory))
		if err != nil {
			return err
		}
		if o.Costs {
			peertest.WithCosts(m)
		}
		if p.s, err = m.OpenOwned(options); err != nil {
			return err
		}
	}
	if err == nil {
		p.d, err = p.s.Device(0)
	}
	return err
}

func (p *party) close() error {
	var errs []error
	for _, b := range p.buffers {
		errs = append(errs, b.Close())
	}
	if p.conn != nil {
		errs = append(errs, p.conn.Close())
	}
	if p.l != nil {
		errs = append(errs, p.l.Close())
	}
	if p.s != nil {
		errs = append(errs, p.s.Close())
	}
	return errors.Join(errs...)
}

func folderOptions(folder string, memory int) sim.Options {
	return sim.Options{Folder: folder, Devices: []sim.DeviceOptions{{Granularity: 64 << 10, Memory: memory}}}
}

// stage is where children meet: a machine that they share, or the real one.
type stage struct {
	t      *testing.T
	folder string
	memory int
	chunk  int
}

// onBoth runs a test of several processes on both drivers.
func onBoth(t *testing.T, test func(t *testing.T, s *stage)) {
	t.Run("software", func(t *testing.T) {
		test(t, &stage{t: t, folder: t.TempDir(), memory: 1 << 30, chunk: 64 << 10})
	})
	t.Run("real", func(t *testing.T) {
		gputest.Real(t)
		test(t, &stage{t: t, chunk: 2 * mib})
	})
}

// child is one of them from the test's side.
type child struct {
	*reexec.Cmd
	t *testing.T
}

func (s *stage) child(files ...*os.File) *child {
	c := &child{reexec.Command(s.t, "party"), s.t}
	c.ExtraFiles = files
	c.Start()
	c.do(order{Do: "open", Folder: s.folder, Memory: s.memory})
	return c
}

func (c *child) try(o order) (r report) {
	c.t.Helper()
	c.Send(o)
	c.Recv(&r)
	return r
}

func (c *child) do(o order) report {
	c.t.Helper()
	r := c.try(o)
	require.Empty(c.t, r.Err, "%+v", o)
	return r
}

// open waits until a child has no more descriptors open than that: many are
// closed while it goes on.
func (c *child) open(most int) (r report) {
	c.t.Helper()
	for start := time.Now(); ; time.Sleep(time.Millisecond) {
		if r = c.do(order{Do: "count"}); r.FDs <= most {
			return r
		}
		require.Less(c.t, time.Since(start), peertest.Guard, "%d descriptors are open, of at most %d", r.FDs, most)
	}
}

// reads checks what a child finds in a buffer.
func (c *child) reads(nth, n, seed int) {
	c.t.Helper()
	r := c.do(order{Do: "read", Nth: nth})
	require.Equal(c.t, n, r.Len)
	require.Equal(c.t, crc32.ChecksumIEEE(pattern(n, seed)), r.Sum)
}

// pass has one child send a buffer to another.
func pass(from, to *child, nth int, o order) report {
	from.t.Helper()
	o.Do = "receive"
	from.Send(order{Do: "send", Nth: nth})
	got := to.do(o)
	var sent report
	from.Recv(&sent)
	require.Empty(from.t, sent.Err)
	return got
}

// connect gives two children a connection, over a socket in a private directory:
// they are each other's siblings.
func (s *stage) connect(server, client *child) {
	s.t.Helper()
	path := filepath.Join(s.t.TempDir(), "sockets", "s")
	server.do(order{Do: "listen", Path: path})
	server.Send(order{Do: "accept"})
	client.do(order{Do: "dial", Path: path})
	var r report
	server.Recv(&r)
	require.Empty(s.t, r.Err)
}

// taken returns how much of the machine's memory is used, in whole chunks, since contexts
// take a little too.
func (s *stage) taken() int {
	u, err := sim.Inspect(s.folder)
	require.NoError(s.t, err)
	return u.Devices[0].Taken / s.chunk * s.chunk
}

// returns waits until the machine's memory has come down to so much.
func (s *stage) returns(want int) {
	s.t.Helper()
	if s.folder != "" {
		require.Eventually(s.t, func() bool { return s.taken() == want }, peertest.Guard, 2*time.Millisecond)
	}
}

func TestSharingBetweenProcesses(t *testing.T) {
	onBoth(t, func(t *testing.T, s *stage) {
		a, b := s.child(), s.child()
		s.connect(a, b)
		n := 5*s.chunk + 7
		a.do(order{Do: "make", N: n, Seed: 1, Chunk: s.chunk})
		first := pass(a, b, 0, order{})
		b.reads(0, n, 1)
		b.do(order{Do: "write", Seed: 2})
		a.reads(0, n, 2)
		second := pass(a, b, 0, order{})
		require.NotEqual(t, first.Ptr, second.Ptr)
		pass(a, b, 0, order{ReadOnly: true})
		b.reads(2, n, 2)
		require.Contains(t, b.try(order{Do: "write", Nth: 2}).Err, "not permitted")
		// And back over the same connection.
		b.do(order{Do: "make", N: n, Seed: 3, Chunk: s.chunk})
		pass(b, a, 3, order{})
		a.reads(1, n, 3)
		a.Wait()
		b.reads(0, n, 2)
		b.Wait()
		s.returns(0)
	})
}

// Received memory can be passed on even after its maker has died: one process after
// another is killed, and the last one still has the memory.
func TestMemoryIsPassedOnAlongAChainOfProcessesThatDie(t *testing.T) {
	onBoth(t, func(t *testing.T, s *stage) {
		a, b := s.child(), s.child()
		n := 70*s.chunk + 7 // more than one message's
		a.do(order{Do: "make", N: n, Seed: 1, Chunk: s.chunk})
		s.connect(a, b)
		pass(a, b, 0, order{Keep: true})
		for seed := 2; seed < 5; seed++ {
			a.Kill()
			c := s.child()
			s.connect(b, c)
			pass(b, c, 0, order{Keep: true})
			c.do(order{Do: "write", Seed: seed})
			b.reads(0, n, seed)
			a, b = b, c
		}
		a.Kill()
		b.reads(0, n, 4)
		s.returns(71 * s.chunk)
		b.do(order{Do: "close"})
		s.returns(0)
		b.Wait()
	})
}

// Free memory returns after the last of them, and not before: so counts a
// process that takes no part.
func TestClosingInEveryOrderAcrossProcesses(t *testing.T) {
	onBoth(t, func(t *testing.T, s *stage) {
		n := 3 * s.chunk
		for _, closing := range [][3]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
			all := [3]*child{s.child(), s.child(), s.child()}
			all[0].do(order{Do: "make", N: n, Seed: 1, Chunk: s.chunk})
			for _, importer := range all[1:] {
				s.connect(all[0], importer)
				pass(all[0], importer, 0, order{})
			}
			for i, k := range closing {
				s.returns(n)
				for _, other := range closing[i:] {
					all[other].reads(0, n, 1)
				}
				all[k].do(order{Do: "close"})
			}
			s.returns(0)
			for _, c := range all {
				c.Wait()
			}
		}
	})
}

func TestAnExporterThatIsKilled(t *testing.T) {
	onBoth(t, func(t *testing.T, s *stage) {
		a, b := s.child(), s.child()
		s.connect(a, b)
		n := 9 * s.chunk
		a.do(order{Do: "make", N: n, Seed: 1, Chunk: s.chunk})
		pass(a, b, 0, order{})
		a.Kill()
		b.reads(0, n, 1)
		b.do(order{Do: "write", Seed: 2})
		b.reads(0, n, 2)
		require.Contains(t, b.try(order{Do: "receive"}).Err, "gone")
		s.returns(n)
		b.do(order{Do: "close"})
		s.returns(0)
		b.Wait()
	})
}

func TestAnImporterThatIsKilled(t *testing.T) {
	onBoth(t, func(t *testing.T, s *stage) {
		a := s.child()
		n := 9 * s.chunk
		a.do(order{Do: "make", N: n, Seed: 1, Chunk: s.chunk})
		before := a.do(order{Do: "count"})
		for range 3 {
			b := s.child()
			s.connect(a, b)
			pass(a, b, 0, order{})
			b.reads(0, n, 1)
			b.Kill()
			a.reads(0, n, 1)
		}
		require.Contains(t, a.try(order{Do: "send"}).Err, "gone")
		after := a.do(order{Do: "count"})
		require.Equal(t, before.Live, after.Live)
		require.LessOrEqual(t, after.FDs, before.FDs+10, "three sockets, their listeners and directories, what the runtime opens, and of the memory the one descriptor that is kept")
		s.returns(n)
		a.do(order{Do: "close"})
		s.returns(0)
		a.Wait()
	})
}

// A peer that dies in the middle affects no one else.
func TestAnExporterThatIsKilledWhileItSends(t *testing.T) {
	s := &stage{t: t, folder: t.TempDir(), memory: 1 << 30, chunk: 64 << 10}
	a, b := s.child(), s.child()
	s.connect(a, b)
	a.do(order{Do: "make", N: 600 * s.chunk, Seed: 1, Chunk: s.chunk, Spots: true})
	before := b.do(order{Do: "count"})
	a.Send(order{Do: "send"})
	b.Send(order{Do: "receive"})
	time.Sleep(5 * time.Millisecond)
	a.Kill()
	var r report
	b.Recv(&r)
	if r.Err == "" { // it was quicker
		b.do(order{Do: "close"})
	} else {
		require.Contains(t, r.Err, "gone")
	}
	after := b.open(before.FDs)
	require.Equal(t, before.Live, after.Live)
	s.returns(0)
	b.Wait()
}

func TestFiveHundredImportsInOneProcess(t *testing.T) {
	onBoth(t, func(t *testing.T, s *stage) {
		a, b := s.child(), s.child()
		s.connect(a, b)
		before := b.do(order{Do: "count"})
		const imports = 500
		for i := range imports {
			a.do(order{Do: "make", N: 100 + i, Seed: i, Chunk: s.chunk})
			pass(a, b, i, order{})
		}
		for i := range imports {
			b.reads(i, 100+i, i)
			b.do(order{Do: "close", Nth: i})
		}
		after := b.do(order{Do: "count"})
		require.Equal(t, before.Live, after.Live)
		require.LessOrEqual(t, after.FDs, before.FDs+1)
		a.Wait()
		b.Wait()
		s.returns(0)
	})
}

// Thousands of chunks under a small limit of open files, between two processes
// of an ordinary user that no process may trace.
func TestManyChunksUnderASmallLimitOfOpenFiles(t *testing.T) {
	onBoth(t, func(t *testing.T, s *stage) {
		dir := s.public()
		if s.folder != "" {
			// This process, which may be root, looks into the machine too, and
			// trusts no folder of the ordinary user's; they share it by group.
			s.folder = filepath.Join(dir, "machine")
			require.NoError(t, os.Mkdir(s.folder, 0o700))
			require.NoError(t, os.Chmod(s.folder, 0o770))
			if os.Geteuid() == 0 {
				require.NoError(t, os.Chown(s.folder, 0, peertest.Unprivileged))
			}
		}
		start := func() *child {
			c := &child{reexec.Command(t, "party"), t}
			c.Start()
			c.do(order{Do: "open", Folder: s.folder, Memory: s.memory, Quiet: true, Small: true})
			return c
		}
		a, b := start(), start()
		path := filepath.Join(dir, "sockets", "s")
		a.do(order{Do: "listen", Path: path})
		a.Send(order{Do: "accept"})
		b.do(order{Do: "dial", Path: path})
		var r report
		a.Recv(&r)
		require.Empty(t, r.Err)
		const chunks = 3435
		n := chunks*s.chunk - 5
		a.do(order{Do: "make", N: n, Seed: 1, Chunk: s.chunk, Spots: true})
		pass(a, b, 0, order{})
		b.do(order{Do: "read", Seed: 1, Spots: true})
		require.Equal(t, chunks, b.open(63).Live)
		a.Wait()
		b.do(order{Do: "read", Seed: 1, Spots: true})
		b.Wait()
		s.returns(0)
	})
}

// public is a directory that an ordinary user may write to.
func (s *stage) public() string {
	dir, err := os.MkdirTemp("", "cuvmm")
	require.NoError(s.t, err)
	s.t.Cleanup(func() { os.RemoveAll(dir) })
	require.NoError(s.t, os.Chmod(dir, 0o777))
	return dir
}

// A parent and its child over an inherited socketpair.
func TestSharingWithAChild(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		peertest.NoLeak(t)
		conn, far, err := peer.Pair(peer.Options{})
		require.NoError(t, err)
		closeLater(t, conn)
		s := &stage{chunk: 2 * mib}
		if d.System().Driver().Software {
			s.folder, s.memory = t.TempDir(), 1<<30
		}
		c := &child{reexec.Command(t, "party"), t}
		c.ExtraFiles = []*os.File{far}
		c.Start()
		far.Close()
		var sys *cuda.System
		if s.folder != "" {
			m, err := sim.New(folderOptions(s.folder, s.memory))
			require.NoError(t, err)
			sys, err = m.OpenOwned(cuda.Options{})
			require.NoError(t, err)
			closeLater(t, sys)
			d = sys.Devices()[0]
			s.chunk = 64 << 10
		}
		c.do(order{Do: "open", Folder: s.folder, Memory: s.memory})
		c.do(order{Do: "inherit"})
		b := filled(t, d, 3*mib, 1)
		var group errgroup.Group
		group.Go(func() error { return handles.SendBuffer(t.Context(), conn, b) })
		c.do(order{Do: "receive"})
		require.NoError(t, group.Wait())
		c.reads(0, 3*mib, 1)
		c.do(order{Do: "write", Seed: 2})
		require.True(t, bytes.Equal(pattern(3*mib, 2), read(t, b)))
		require.NoError(t, b.Close())
		c.reads(0, 3*mib, 2)
		c.Wait()
	})
}

// A descriptor that is still open somewhere keeps the memory taken.
func TestTheLastDescriptorHoldsTheMemory(t *testing.T) {
	s := &stage{t: t, folder: t.TempDir(), memory: 1 << 30, chunk: 64 << 10}
	m, err := sim.New(folderOptions(s.folder, s.memory))
	require.NoError(t, err)
	sys, err := m.OpenOwned(cuda.Options{})
	require.NoError(t, err)
	closeLater(t, sys)
	b := filled(t, sys.Devices()[0], 2*mib, 1)
	v, err := share.Of(b).View("test", 2*mib)
	require.NoError(t, err)
	n, err := v.Chunks[0].Handle.Export("test")
	require.NoError(t, err)
	f, err := peer.NewFD(n)
	require.NoError(t, err)
	other, err := f.Dup()
	require.NoError(t, err)
	require.NoError(t, v.Release())
	require.NoError(t, b.Close())
	require.Equal(t, 1, sys.Stats().SharedReleased)
	s.returns(2 * mib)
	require.NoError(t, f.Close())
	require.Equal(t, 2*mib, s.taken())
	require.NoError(t, other.Close())
	s.returns(0)
}
