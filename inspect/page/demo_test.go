package page_test

import (
	"context"
	"fmt"
	"math/rand"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/internal/test/browser"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

const mib = 1 << 20

// program is a program on two software GPUs that serves a model: weights with followers, a
// cache of sequences that share their prompt, pools, and ranges that it maps itself.
type program struct {
	*testing.T
	sys    *cuda.System
	dev    []*cuda.Device
	stream []*cuda.Stream
	rand   *rand.Rand
}

func (p program) must(err error) {
	p.Helper()
	require.NoError(p, err)
}

func (p program) closing(c interface{ Close() error }) {
	p.Cleanup(func() { require.NoError(p, c.Close()) })
}

// serving returns a snapshot of such a program, of forty ranges.
func serving(t *testing.T) inspect.Snapshot {
	t.Helper()
	const gpu = 8 << 30
	_, sys := sim.Open(t, sim.Options{DriverVersion: 13040, Devices: []sim.DeviceOptions{{Memory: gpu}, {Memory: gpu}}})
	p := program{T: t, sys: sys, dev: sys.Devices(), rand: rand.New(rand.NewSource(7))}
	for _, d := range p.dev {
		s, err := d.NewStream(cuda.StreamOptions{})
		p.must(err)
		p.closing(s)
		p.stream = append(p.stream, s)
	}
	p.sequences()
	p.weights()
	p.pools()
	p.pages()
	p.objects()
	p.managed()
	p.ranges()
	p.asleep()
	s, err := inspect.Take(sys)
	p.must(err)
	require.Len(t, s.Reservations, 40)
	s.Process.Name = "server"
	for i, stack := range s.Stacks { // the program's own, as if it were one
		var own inspect.Stack
		for _, frame := range stack {
			if _, method, found := strings.Cut(frame, "page_test.program."); found {
				own = append(own, "main.server."+regexp.MustCompile(` \(.*:`).ReplaceAllString(method, " (server.go:"))
			}
		}
		s.Stacks[i] = own
	}
	return s
}

// sequences makes a prompt and 24 sequences that go on from it.
func (p program) sequences() {
	prompt, err := vmm.NewArray[byte](p.dev[0], vmm.BufferOptions{Chunks: vmm.FixedChunks(2 * mib), Name: "sequence", Tag: "sequences"})
	p.must(err)
	p.closing(prompt)
	const length = 11 * mib
	p.must(prompt.Resize(p.stream[0], length))
	for range 16 {
		s, err := prompt.Fork(p.stream[0], length, vmm.ForkOptions{})
		p.must(err)
		p.closing(s)
		p.must(s.Resize(p.stream[0], length+p.rand.Intn(40*mib)))
	}
}

// weights publishes an array, which two followers of the other device map.
func (p program) weights() {
	array, err := vmm.NewArray[float32](p.dev[0], vmm.BufferOptions{Chunks: vmm.FixedChunks(32 * mib)})
	p.must(err)
	p.must(array.Resize(p.stream[0], 90*mib))
	server := publish.NewServer(publish.ServerOptions{})
	listener, err := peer.Listen(filepath.Join(p.TempDir(), "own"), "server", peer.Options{})
	p.must(err)
	served := make(chan error, 1)
	go func() { served <- server.Serve(p.Context(), listener) }()
	publication, err := publish.Array(server, "weights", array)
	p.must(err)
	p.must(publication.Announce(p.Context(), array.Len()))
	p.Cleanup(func() {
		p.must(publication.Withdraw())
		p.must(listener.Close())
		p.must(<-served)
		p.must(server.Close())
		p.must(array.Close())
	})
	for range 2 {
		conn, err := peer.Dial(p.Context(), listener.Path(), peer.Options{})
		p.must(err)
		client := publish.NewClient(conn)
		p.closing(client)
		f, err := publish.Follow[float32](p.Context(), client, p.dev[0], "weights", publish.FollowOptions{ReadOnly: true})
		p.must(err)
		p.closing(f)
		p.must(f.Next(p.Context()))
	}
}

// pools makes a pool on each device, the first with a history.
func (p program) pools() {
	for i, d := range p.dev {
		q, err := pool.New(d, pool.Options{Track: true, Name: []string{"training", "scratch"}[i]})
		p.must(err)
		p.closing(q)
		if i == 0 {
			q.StartHistory(pool.HistoryOptions{})
		}
		var live []pool.Block
		p.Cleanup(func() {
			for _, b := range live {
				p.must(q.Free(b))
			}
		})
		tags := []pool.Tag{pool.NewTag("activations"), pool.NewTag("kv cache"), pool.NewTag("gradients"), pool.NewTag("workspace")}
		for range 260 {
			b, err := q.Alloc(pool.Request{Bytes: 16<<10 + p.rand.Intn(3*mib), Stream: p.stream[i], Tag: tags[p.rand.Intn(len(tags))]})
			p.must(err)
			if live = append(live, b); p.rand.Intn(5) < 2 {
				at := p.rand.Intn(len(live))
				p.must(q.Free(live[at]))
				live[at] = live[len(live)-1]
				live = live[:len(live)-1]
			}
		}
	}
}

// pages makes two sequences with holes, whose first pages are one memory.
func (p program) pages() {
	pages, err := vmm.NewPages(p.dev[0], vmm.PagesOptions{Name: "kv"})
	p.must(err)
	p.closing(pages)
	var first *vmm.Sparse
	for i := range 2 {
		s, err := vmm.NewSparse(p.dev[0], vmm.SparseOptions{Pages: pages, Reserve: 256 * mib, Name: fmt.Sprint("request ", i), Tag: "kv cache"})
		p.must(err)
		p.closing(s)
		if i == 0 {
			first = s
			p.must(s.Map(p.Context(), p.stream[0], vmm.Span{N: 6}, vmm.Span{First: 40, N: 9}, vmm.Span{First: 80, N: 1}))
			continue
		}
		p.must(s.Share(p.Context(), first, 0, vmm.Span{N: 6}))
		p.must(s.Map(p.Context(), p.stream[0], vmm.Span{First: 8, N: 20}))
	}
}

// objects has a broker, and a client of it that has an object mapped.
func (p program) objects() {
	socket, err := peer.Listen(filepath.Join(p.TempDir(), "own"), "broker", peer.Options{})
	p.must(err)
	b, err := broker.New(p.Context(), p.sys, broker.Options{})
	p.must(err)
	served := make(chan error, 1)
	ctx, stop := context.WithCancel(context.Background())
	go func() { served <- b.Serve(ctx, socket) }()
	client, err := broker.Dial(ctx, socket.Path(), broker.DialOptions{})
	p.must(err)
	w, err := client.Create(ctx, p.dev[1], "adapter", broker.CreateOptions{Bytes: 24 * mib})
	p.must(err)
	object, err := w.Commit(ctx, nil)
	p.must(err)
	p.Cleanup(func() {
		p.must(object.Close())
		p.must(client.Close())
		stop()
		<-served
		p.must(b.Close())
		p.must(socket.Close())
	})
}

// managed makes managed memory: half of it on a device, a quarter on the host.
func (p program) managed() {
	m, err := managed.New(p.dev[1], 96*mib, managed.Options{})
	p.must(err)
	p.closing(m)
	for to, part := range map[cuda.Location][2]int{cuda.OnDevice(1): {0, 48 * mib}, cuda.OnHost(): {48 * mib, 72 * mib}} {
		r, err := m.Slice(part[0], part[1])
		p.must(err)
		p.must(r.Prefetch(nil, to))
	}
}

// asleep suspends two arrays.
func (p program) asleep() {
	for range 2 {
		a, err := vmm.NewArray[byte](p.dev[1], vmm.BufferOptions{Reserve: 128 * mib, Name: "tenant b", Tag: "tenant b"})
		p.must(err)
		p.closing(a)
		p.must(a.Resize(p.stream[1], 60*mib))
	}
	z, err := vmm.Suspend(p.Context(), vmm.SuspendOptions{}, vmm.Tagged(p.sys, "tenant b")...)
	p.must(err)
	p.Cleanup(func() { p.must(z.Resume(context.Background())) })
}

// ranges reserves ranges that the program maps itself, some memory twice.
func (p program) ranges() {
	for i := 0; ; i++ {
		if p.sys.Stats().Reservations == 38 {
			return
		}
		d := p.dev[i%2]
		space, err := vmm.Reserve(d, (64<<(i%3))*mib, vmm.ReserveOptions{})
		p.must(err)
		p.closing(space)
		memory, err := vmm.Create(d, 8*mib, vmm.Properties{})
		p.must(err)
		p.closing(memory)
		for _, at := range []int{0, 16 * mib, 48 * mib}[:1+i%3] {
			m, err := space.Map(at, memory)
			p.must(err)
			p.closing(m)
		}
	}
}

// TestLookAtThePage writes pictures into a folder, to look at, and the one of the README. It
// checks nothing but that there are forty ranges.
func TestLookAtThePage(t *testing.T) {
	to := os.Getenv("CUVMM_PAGES")
	if to == "" {
		t.Skip("CUVMM_PAGES names no folder")
	}
	served := serving(t)
	first, second := many(3000), many(3000)
	second.Pools[0].Segments[0].Blocks = second.Pools[0].Segments[0].Blocks[:2000]
	const choose = `find("kv cache"); neighbour(1); scrollTo_(0); draw();`
	browser.Window{Width: 1280, Height: 960}.Picture(t, written(t, served), choose, filepath.Join(to, "map.png"))
	for name, c := range map[string]struct {
		snapshots []inspect.Snapshot
		script    string
	}{
		"one": {[]inspect.Snapshot{regions(1)}, ""}, "15": {[]inspect.Snapshot{regions(15)}, ""}, "100": {[]inspect.Snapshot{regions(100)}, ""},
		"10000": {[]inspect.Snapshot{regions(10_000)}, ""}, "forty": {[]inspect.Snapshot{served}, choose}, "two": {[]inspect.Snapshot{first, second}, ""},
		"none": {[]inspect.Snapshot{snapshot()}, ""}, "folded": {[]inspect.Snapshot{served}, "toggleAll();"}, "end": {[]inspect.Snapshot{served}, "scrollTo_(1e9);"}, "blocks": {[]inspect.Snapshot{many(100_000)}, ""},
	} {
		text := written(t, c.snapshots...)
		require.NoError(t, os.WriteFile(filepath.Join(to, name+".html"), []byte(text), 0o600))
		for _, width := range []int{1280, 420} {
			for _, dark := range []bool{false, true} {
				browser.Window{Width: width, Height: 900, Dark: dark}.Picture(t, text, c.script+"draw();", filepath.Join(to, fmt.Sprintf("%s-%d-%t.png", name, width, dark)))
			}
		}
	}
}
