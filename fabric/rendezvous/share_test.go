//go:build linux

package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

var place = sim.Fabric{Channels: []int{3}}

// seat is a rank's System on the machine of a folder.
func seat(t testing.TB, folder string, f sim.Fabric) (*sim.Machine, *cuda.Device) {
	m, s := sim.Open(t, sim.Options{Folder: folder, Fabric: f, Devices: []sim.DeviceOptions{{Memory: 64 << 20, Granularity: 64 << 10}}})
	return m, s.Devices()[0]
}

// typesOf are the handle types that a trial found to work.
func typesOf(d *cuda.Device) (vmm.HandleTypes, error) {
	p, err := d.Probe()
	types := vmm.PosixFD
	if p.Fabric {
		types |= vmm.Fabric
	}
	return types, err
}

// shareAll agrees, shares a buffer that holds this rank's number, and checks
// the other ranks' buffers.
func shareAll(ctx context.Context, g *Group, d *cuda.Device, chunks int) (how vmm.HandleTypes, err error) {
	types, err := typesOf(d)
	if err != nil {
		return 0, err
	}
	return shareWith(ctx, g, d, types, chunks)
}

func shareWith(ctx context.Context, g *Group, d *cuda.Device, types vmm.HandleTypes, chunks int) (how vmm.HandleTypes, err error) {
	a, err := Agree(ctx, g, FactsOf(d, types))
	if err != nil {
		return 0, err
	}
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 16 << 20, Chunks: vmm.FixedChunks(64 << 10), Memory: vmm.Properties{Handles: a.Handle}})
	if err != nil {
		g.Fail(err)
		return 0, err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	for range chunks {
		if _, err := b.Append(nil, fmt.Appendf(nil, "%65536d", g.Rank())); err != nil {
			g.Fail(err)
			return 0, err
		}
	}
	all, err := Share(ctx, g, a, d, b, ShareOptions{})
	if err != nil {
		return 0, err
	}
	defer func() {
		for _, o := range all {
			if o != nil {
				err = errors.Join(err, o.Close())
			}
		}
	}()
	for r, o := range all {
		if r == g.Rank() {
			continue
		}
		part, err := o.Slice(o.Len()-8, o.Len())
		got := make([]byte, 8)
		if err := errors.Join(err, part.CopyTo(nil, got)); err != nil {
			return 0, err
		}
		if want := fmt.Sprintf("%8d", r); string(got) != want {
			return 0, fmt.Errorf("read %q of rank %d", got, r)
		}
	}
	return a.Handle, g.Barrier(ctx, "read")
}

func TestNoGroupAgreesAndShares(t *testing.T) {
	_, agreed := Agree(t.Context(), nil, Facts{})
	_, shared := Share(t.Context(), nil, Agreement{}, nil, nil, ShareOptions{})
	for _, err := range []error{agreed, shared} {
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.ErrorContains(t, err, "a nil group")
	}
}

// All ranks share by one type: the fabric's where all have it, else descriptors.
func TestShare(t *testing.T) {
	without := sim.Fabric{}
	cluster := func(clique uint32) sim.Fabric {
		return sim.Fabric{Channels: place.Channels, Cluster: [16]byte{1}, Clique: clique}
	}
	for name, row := range map[string]struct {
		places []sim.Fabric
		want   vmm.HandleTypes
	}{
		"a channel for all":        {[]sim.Fabric{place, place, place}, vmm.Fabric},
		"one rank without channel": {[]sim.Fabric{place, without, place}, vmm.PosixFD},
		"a clique for all":         {[]sim.Fabric{cluster(7), cluster(7), cluster(7)}, vmm.Fabric},
		"a rank in another clique": {[]sim.Fabric{cluster(7), cluster(8), cluster(7)}, vmm.PosixFD},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, 3, Options{}, func(t *testing.T, groups []*Group) {
				folder := t.TempDir()
				devices := make([]*cuda.Device, len(groups))
				for r := range groups {
					_, devices[r] = seat(t, folder, row.places[r])
				}
				before := handles.Leases()
				for _, err := range together(groups, func(g *Group) error {
					how, err := shareAll(t.Context(), g, devices[g.Rank()], 5)
					if err == nil && how != row.want {
						err = fmt.Errorf("by %v", how)
					}
					return err
				}) {
					require.NoError(t, err)
				}
				require.Equal(t, before, handles.Leases())
			})
		})
	}
}

// A rank without memory still imports that of the others; one that cannot
// import ends the group for all, with its number, and nothing is kept.
func TestShareThatFails(t *testing.T) {
	each(t, 3, Options{Timeout: testTimeout}, func(t *testing.T, groups []*Group) {
		folder := t.TempDir()
		devices, machines := make([]*cuda.Device, 3), make([]*sim.Machine, 3)
		buffers := make([]*vmm.Buffer, 3)
		for r := range groups {
			machines[r], devices[r] = seat(t, folder, place)
			if r == 0 {
				continue
			}
			b, err := vmm.NewBuffer(devices[r], vmm.BufferOptions{Reserve: 1 << 20, Memory: vmm.Properties{Handles: vmm.Fabric}})
			require.NoError(t, err)
			require.NoError(t, gputest.Err(b.AppendUndefined(1<<16)))
			buffers[r] = b
		}
		a := Agreement{Handle: vmm.Fabric}
		for _, err := range together(groups, func(g *Group) error {
			all, err := Share(t.Context(), g, a, devices[g.Rank()], buffers[g.Rank()], ShareOptions{})
			if err != nil {
				return err
			}
			for r, b := range all {
				if (b != nil) != (r != g.Rank() && r != 0) {
					return fmt.Errorf("rank %d has %v of rank %d", g.Rank(), b, r)
				}
				if b != nil {
					err = errors.Join(err, b.Close())
				}
			}
			return err
		}) {
			require.NoError(t, err)
		}
		machines[1].Inject(sim.Fault{Call: "cuMemImportFromShareableHandle", Result: 400})
		for r, err := range together(groups, func(g *Group) error {
			_, err := Share(t.Context(), g, a, devices[g.Rank()], buffers[g.Rank()], ShareOptions{})
			return err
		}) {
			require.Error(t, err)
			require.ErrorContains(t, err, "rank 2", "whose memory it was")
			if r != 1 {
				require.ErrorIs(t, err, ErrFailed)
				require.ErrorContains(t, err, "rank 1")
				require.ErrorContains(t, err, `"import memory"`)
			}
		}
		for r, b := range buffers {
			if b != nil {
				require.NoError(t, b.Close())
			}
			require.Zero(t, devices[r].System().Stats().Allocations)
		}
	})
}

// Memory of another type than agreed on is refused by all.
func TestShareByAnotherType(t *testing.T) {
	groups, err := InProcess(2, Options{})
	require.NoError(t, err)
	_, d := seat(t, t.TempDir(), place)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 1 << 20})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.AppendUndefined(1<<16)))
	for _, err := range together(groups, func(g *Group) error {
		_, err := Share(t.Context(), g, Agreement{Handle: vmm.Fabric}, d, b, ShareOptions{})
		return err
	}) {
		require.True(t, errors.Is(err, cuda.ErrNotSupported) || errors.Is(err, ErrFailed), "%v", err)
	}
	require.NoError(t, b.Close())
	for _, g := range groups {
		require.NoError(t, g.Close())
	}
}

// If the driver does not release memory that a rank shared and has closed meanwhile, the
// group has shared all the same, and Drain retries the release.
func TestShareOfMemoryThatIsNotReleased(t *testing.T) {
	groups, err := InProcess(2, Options{Timeout: testTimeout})
	require.NoError(t, err)
	folder := t.TempDir()
	m, d := seat(t, folder, place)
	_, other := seat(t, folder, place)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 1 << 20, Memory: vmm.Properties{Handles: vmm.Fabric}})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(b.AppendUndefined(1<<16)))
	before := handles.Leases().Open
	var log bytes.Buffer
	var remove func()
	for r, err := range together(groups, func(g *Group) error {
		d, o, mine := d, ShareOptions{Log: slog.New(slog.NewTextHandler(&log, nil))}, b
		if g.Rank() == 1 {
			for handles.Leases().Open == before { // rank 0 has yet to lease its buffer
				time.Sleep(time.Millisecond)
			}
			if err := b.Close(); err != nil {
				return err
			}
			remove = m.Inject(sim.Fault{Call: "cuMemRelease", Result: 999})
			d, o, mine = other, ShareOptions{}, nil
		}
		all, err := Share(t.Context(), g, Agreement{Handle: vmm.Fabric}, d, mine, o)
		for _, b := range all {
			if b != nil {
				err = errors.Join(err, b.Close())
			}
		}
		return err
	}) {
		require.NoError(t, err, "rank %d", r)
	}
	require.Contains(t, log.String(), "could not be released at once")
	remove()
	require.NoError(t, d.System().Drain(t.Context()))
	for _, g := range groups {
		require.NoError(t, g.Close())
	}
}

// sharing shares memory again and again until a step fails, by fabric and by
// descriptor in turn. It calls running when both have been done.
func sharing(g *Group, folder string, running func() error) (o outcome) {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	m, err := sim.New(sim.Options{Folder: folder, Fabric: place, Devices: []sim.DeviceOptions{{Memory: 64 << 20, Granularity: 64 << 10}}})
	if err != nil {
		return outcome{Step: "open", Err: err.Error()}
	}
	s, err := m.Open(cuda.Options{})
	if err != nil {
		return outcome{Step: "open", Err: err.Error()}
	}
	d := s.Devices()[0]
	for i := 0; err == nil; i++ {
		if i == 2 {
			if err = running(); err != nil {
				break
			}
		}
		_, err = shareWith(ctx, g, d, []vmm.HandleTypes{vmm.Fabric | vmm.PosixFD, vmm.PosixFD}[i%2], 3)
	}
	o = outcome{Step: g.last().Name, Err: err.Error(), Gone: errors.Is(err, peer.ErrGone)}
	_ = g.Close()
	// Nothing of it is left.
	if err := errors.Join(s.Drain(ctx), s.Close(), m.Close()); err != nil {
		o.Err += "; " + err.Error()
		o.Files = -1
	} else {
		o.Files = peer.OpenFDs() + handles.Leases().Open
	}
	return o
}

const sharers = 3

func init() {
	// Rank 0 makes the group in a directory, and reports its path.
	reexec.Register("sharer", func(c *reexec.Child) (err error) {
		var g *Group
		if rank, _ := strconv.Atoi(c.Args[1]); rank > 0 {
			g, err = Join(context.Background(), c.Args[0], rank, sharers, Options{Timeout: testTimeout})
		} else {
			var path string
			if g, path, err = Host(c.Args[0], "", sharers, Options{Timeout: testTimeout}); err == nil {
				err = c.Send(path)
			}
		}
		if err != nil {
			return err
		}
		return c.Send(sharing(g, c.Args[2], func() error { return c.Send("running") }))
	})
}

// If a process is killed while memory is shared, at any step, the host's
// included, the others name it in time. They keep nothing, and nothing of its
// memory is left.
func TestKilledSharers(t *testing.T) {
	for round := range killRounds(9) {
		random := rand.New(rand.NewPCG(uint64(round), 2))
		victim := round % sharers
		folder, at := t.TempDir(), filepath.Join(t.TempDir(), "private")
		children := make([]*reexec.Cmd, sharers)
		for r := range children {
			children[r] = reexec.Command(t, "sharer", at, strconv.Itoa(r), folder)
			children[r].Start()
			if r == 0 {
				children[r].Recv(&at)
			}
		}
		for _, c := range children {
			var running string
			c.Recv(&running)
		}
		time.Sleep(time.Duration(random.IntN(20_000)) * time.Microsecond)
		children[victim].Kill()
		for r, c := range children {
			if r == victim {
				continue
			}
			var o outcome
			c.Recv(&o)
			c.Wait()
			o.names(t, victim)
			require.True(t, o.Gone, "round %d, rank %d: %+v", round, r, o)
			require.Zero(t, o.Files, "round %d, rank %d: %+v", round, r, o)
		}
		require.Eventually(t, func() bool {
			used, err := sim.Inspect(folder)
			require.NoError(t, err)
			return len(used.Processes) == 0 && len(used.Exported) == 0 && used.Devices[0].Taken == 0 && used.HostTaken == 0
		}, testTimeout, time.Millisecond, "round %d: something is left", round)
	}
}
