//go:build linux

package adversary

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

const panickingPTX = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry adversary_panic() { ret; }\n"

func init() {
	sim.RegisterKernel("adversary_panic", func(*sim.Kernel) { panic("a defect of the kernel") })
}

// owned are objects of every kind that has something of the driver's, oldest first.
type owned struct {
	t   *testing.T
	all []func() error
}

func own[T interface{ Close() error }](o *owned, made T, err error) T {
	o.t.Helper()
	require.NoError(o.t, err)
	o.all = append(o.all, made.Close)
	return made
}

// close closes all, which succeeds whatever became of the device.
func (o *owned) close() {
	for i := len(o.all) - 1; i >= 0; i-- {
		require.NoError(o.t, o.all[i]())
	}
}

// everything makes one of each kind on a device, each in use by the stream.
func (o *owned) everything(sys *cuda.System, d *cuda.Device, s *cuda.Stream) {
	t := o.t
	own(o, must(d.NewEvent(cuda.EventOptions{}))(t), nil)
	own(o, must(d.NewHostBuffer(4096))(t), nil)
	module := own(o, must(d.LoadModule(kernels.Basic))(t), nil)
	own(o, must(d.LoadModule([]byte(panickingPTX)))(t), nil)

	buffer := own(o, must(vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 << 20}))(t), nil)
	must(buffer.Append(s, make([]byte, 100)))(t)
	must(buffer.Append(nil, make([]byte, 3<<20)))(t)
	graph := own(o, must(s.WithCapture(cuda.CaptureOptions{}, func() error { return s.Upload(buffer.Ptr(), []byte{1}) }))(t), nil)
	require.NoError(t, graph.Launch(s))
	fill := must(module.Kernel(kernels.Fill))(t)
	require.NoError(t, fill.Launch(s, cuda.Threads(1), buffer.Ptr(), uint64(1), uint32(1), uint32(1)))

	space := own(o, must(vmm.Reserve(d, 4<<20, vmm.ReserveOptions{}))(t), nil)
	memory := own(o, must(vmm.Create(d, 2<<20, vmm.Properties{}))(t), nil)
	own(o, must(space.Map(0, memory))(t), nil)

	own(o, must(managed.New(d, 1<<20, managed.Options{}))(t), nil)
	allocator := own(o, must(managed.NewAllocator(d, managed.Options{Stream: s}))(t), nil)
	must(allocator.New(s, 1<<20))(t)

	blocks := own(o, must(pool.New(d, pool.Options{}))(t), nil)
	require.NoError(t, blocks.Free(must(blocks.Alloc(pool.Request{Bytes: 3 << 20, Stream: s}))(t)))
	block := must(blocks.Alloc(pool.Request{Bytes: 1 << 20, Stream: s}))(t)
	o.all = append(o.all, func() error { return blocks.Free(block) })

	object := own(o, must(multicast.Create(sys, 2<<20, multicast.Properties{Devices: 1}))(t), nil)
	require.NoError(t, object.AddDevice(d))
	own(o, must(object.Bind(d, 0, memory, 0, 2<<20))(t), nil)
}

// follow has the buffer published, and followed by the same process.
func (o *owned) follow(d *cuda.Device, s *cuda.Stream) {
	t := o.t
	array := own(o, must(vmm.NewArray[float32](d, vmm.BufferOptions{Reserve: 8 << 20}))(t), nil)
	dir := filepath.Join(t.TempDir(), "sockets") // Listen makes it, for this user alone
	listener := must(peer.Listen(dir, "server", peer.Options{}))(t)
	server := publish.NewServer(publish.ServerOptions{})
	serving := make(chan error, 1)
	go func() { serving <- server.Serve(context.Background(), listener) }()
	o.all = append(o.all, func() error {
		require.NoError(t, server.Close())
		require.NoError(t, listener.Close())
		<-serving
		return nil
	})
	publication := must(publish.Array(server, "weights", array))(t)
	must(array.Append(s, make([]float32, 10)))(t)
	require.NoError(t, publication.Announce(t.Context(), array.Len(), s))
	conn := must(peer.Dial(t.Context(), filepath.Join(dir, "server"), peer.Options{}))(t)
	client := own(o, publish.NewClient(conn), nil)
	follower := own(o, must(publish.Follow[float32](t.Context(), client, d, "weights", publish.FollowOptions{}))(t), nil)
	require.NoError(t, follower.Next(t.Context(), s))
}

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		require.NoError(t, err)
		return v
	}
}

// However a context is lost, everything on it can be closed, nothing is left on
// the machine, and its memory is free again.
func TestALostContextLeavesNothing(t *testing.T) {
	for name, lose := range map[string]func(t *testing.T, m *sim.Machine, s *cuda.Stream, p cuda.Ptr){
		"an overlapping copy": func(t *testing.T, _ *sim.Machine, s *cuda.Stream, p cuda.Ptr) {
			require.NoError(t, s.Copy(p, p+1, 50))
		},
		"a kernel that panics": func(t *testing.T, _ *sim.Machine, s *cuda.Stream, _ cuda.Ptr) {
			module := must(s.Device().LoadModule([]byte(panickingPTX)))(t)
			kernel := must(module.Kernel("adversary_panic"))(t)
			require.NoError(t, kernel.Launch(s, cuda.Threads(1)))
			require.ErrorIs(t, s.Synchronize(), cuda.ErrDeviceLost)
			require.NoError(t, module.Close())
		},
		"an injected fault": func(t *testing.T, m *sim.Machine, s *cuda.Stream, p cuda.Ptr) {
			m.Hold(s.Handle())
			require.NoError(t, s.Memset(p, 1, 8))
			m.Inject(sim.Fault{Call: "cuEventSynchronize", Result: 700})
		},
		"an injected fault of a teardown": func(t *testing.T, m *sim.Machine, s *cuda.Stream, p cuda.Ptr) {
			event := must(s.Device().NewEvent(cuda.EventOptions{}))(t)
			m.Inject(sim.Fault{Call: "cuEventDestroy", Result: 719})
			require.NoError(t, event.Close())
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := sim.WithMulticast(2)
			m, sys := sim.Open(t, o)
			free := func() (all int) {
				for i := range o.Devices {
					n, _ := m.Memory(i)
					all += n
				}
				return all
			}
			before := free()
			made := &owned{t: t}
			for _, d := range sys.Devices() {
				s := own(made, must(d.NewStream(cuda.StreamOptions{}))(t), nil)
				made.everything(sys, d, s)
				made.follow(d, s)
			}
			d := sys.Devices()[0]
			s := own(made, must(d.NewStream(cuda.StreamOptions{}))(t), nil)
			buffer := own(made, must(vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 8 << 20}))(t), nil)
			must(buffer.Append(s, make([]byte, 100)))(t)
			lose(t, m, s, buffer.Ptr())
			require.ErrorIs(t, s.Synchronize(), cuda.ErrDeviceLost)
			require.NotEmpty(t, m.Fault())
			made.close()
			require.NoError(t, sys.Drain(t.Context()))
			require.NoError(t, sys.Close())
			require.Empty(t, m.Leaks())
			require.Equal(t, before, free())
		})
	}
}
