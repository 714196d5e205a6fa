//go:build linux

package publish_test

import (
	"bytes"
	"crypto/sha256"
	"math"
	"path/filepath"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// layout has a tensor, and two that share memory.
func layout() *handles.Manifest {
	return &handles.Manifest{Bytes: 4096, Tensors: []handles.Tensor{
		{Name: "norm", Element: handles.BFloat16, Shape: []int{256}, Kind: "parameter", Digest: "crc32c:00000001"},
		{Name: "embed", Element: handles.Float32, Shape: []int{16, 32}, Offset: 1024, Alias: 1},
		{Name: "head", Element: handles.Float32, Shape: []int{32, 16}, Strides: []int{1, 32}, Offset: 1024, Alias: 1},
	}}
}

// pattern are bytes that differ from their neighbours.
func pattern(n int) []byte {
	all := make([]byte, n)
	for i := range all {
		all[i] = byte(i * 7)
	}
	return all
}

func TestTensorsAreFoundByName(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		server, path := publishing(t, publish.ServerOptions{})
		a, err := vmm.NewArray[byte](d, vmm.BufferOptions{Reserve: 2 * mib, Tag: "model"})
		require.NoError(t, err)
		closeLater(t, a)
		want := layout()
		p, err := publish.Array(server, "weights", a, publish.PublishOptions{Manifest: want})
		require.NoError(t, err)
		defer func() { require.NoError(t, p.Withdraw()) }()
		want.Tensors[0].Name = "changed later"
		require.NoError(t, gputest.Err(a.Append(nil, pattern(4096))))

		k := client(t, path)
		all, err := k.List(peertest.Context(t))
		require.NoError(t, err)
		require.Equal(t, cuda.Tag("model"), all[0].Tag)
		expected := layout()
		expected.Tensors[0].Digest = ""
		f, err := publish.Follow[byte](peertest.Context(t), k, d, "weights", publish.FollowOptions{ReadOnly: true, Expect: expected})
		require.NoError(t, err)
		defer func() { require.NoError(t, f.Close()) }()
		require.Equal(t, layout(), f.Manifest())
		require.Equal(t, all[0].Description, sha256.Sum256(f.Description()))
		require.Equal(t, cuda.Tag("model"), f.Tag())
		_, _, err = f.Tensor("norm")
		require.ErrorIs(t, err, cuda.ErrOutOfRange, "nothing is shown yet")
		require.ErrorContains(t, err, "call Next first")
		require.NoError(t, p.Announce(peertest.Context(t), 4096))
		require.NoError(t, f.Next(peertest.Context(t)))
		for _, tensor := range layout().Tensors {
			got, memory, err := f.Tensor(tensor.Name)
			require.NoError(t, err)
			require.Equal(t, tensor, got)
			read := make([]byte, got.Size())
			require.NoError(t, memory.CopyTo(nil, read))
			require.Equal(t, pattern(4096)[tensor.Offset:tensor.Offset+tensor.Size()], read, tensor.Name)
		}
		_, _, err = f.Tensor("none")
		require.ErrorIs(t, err, publish.ErrUnknown)

		expected.Tensors[1].Element, expected.Tensors[2].Offset = handles.Int32, 1028
		_, err = publish.Follow[byte](peertest.Context(t), k, d, "weights", publish.FollowOptions{Expect: expected})
		require.ErrorIs(t, err, handles.ErrMismatch)
		require.ErrorContains(t, err, `publication "weights"`)
		require.ErrorContains(t, err, `tensor "embed" has element float32 instead of int32; tensor "head" has offset 1024 instead of 1028`)
		require.Eventually(t, func() bool { return len(p.Stats().Followers) == 1 }, peertest.Guard, time.Millisecond, "the follower that was refused left")
	})
}

func TestDescriptionsAreTheProgramsOwn(t *testing.T) {
	d := gputest.Software(t)
	server, path := publishing(t, publish.ServerOptions{})
	a, err := vmm.NewArray[uint32](d, vmm.BufferOptions{Reserve: 2 * mib})
	require.NoError(t, err)
	closeLater(t, a)
	text := pattern(100_000)
	p, err := publish.Array(server, "numbers", a, publish.PublishOptions{Description: text})
	require.NoError(t, err)
	text[0]++
	k := client(t, path)
	f := followed(t, k, d, publish.FollowOptions{})
	require.Equal(t, pattern(100_000), f.Description())
	require.Nil(t, f.Manifest())
	_, err = publish.Follow[uint32](peertest.Context(t), k, d, "numbers", publish.FollowOptions{Expect: layout()})
	require.ErrorIs(t, err, handles.ErrMismatch)
	require.ErrorContains(t, err, "has no manifest")
	require.NoError(t, p.Withdraw())

	p, err = publish.Array(server, "numbers", a, publish.PublishOptions{Manifest: &handles.Manifest{Bytes: 64, Tensors: []handles.Tensor{
		{Name: "odd", Element: handles.Uint8, Shape: []int{3}}, {Name: "even", Element: handles.Uint8, Shape: []int{4}, Offset: 8}}}})
	require.NoError(t, err)
	require.NoError(t, gputest.Err(a.Append(nil, counting(0, 16))))
	require.NoError(t, p.Announce(peertest.Context(t), 16))
	g := followed(t, k, d, publish.FollowOptions{})
	require.NoError(t, g.Next(peertest.Context(t)))
	_, _, err = g.Tensor("odd")
	require.ErrorIs(t, err, handles.ErrMismatch)
	_, even, err := g.Tensor("even")
	require.NoError(t, err)
	read := make([]uint32, 1)
	require.NoError(t, even.CopyTo(nil, read))
	require.Equal(t, []uint32{2}, read)
	require.NoError(t, p.Withdraw())
	require.NoError(t, f.Close())
	require.NoError(t, g.Close())
	require.NoError(t, p.Released().Wait(peertest.Context(t)))
	require.Nil(t, new(publish.Follower[uint32]).Description())

	before := peer.OpenFDs()
	for what, o := range map[string][]publish.PublishOptions{
		"both":                  {{Description: []byte("x"), Manifest: layout()}},
		"two":                   {{}, {}},
		"a long text":           {{Description: make([]byte, publish.MaxDescription+1)}},
		"more than the memory":  {{Manifest: &handles.Manifest{Bytes: 2*mib + 1}}},
		"more than any memory":  {{Manifest: &handles.Manifest{Bytes: 1 << 60}}},
		"a manifest that is no": {{Manifest: &handles.Manifest{Bytes: math.MaxInt}}},
	} {
		_, err := publish.Array(server, "numbers", a, o...)
		if what == "a manifest that is no" {
			require.ErrorIs(t, err, handles.ErrManifest)
		} else {
			require.ErrorIs(t, err, cuda.ErrInvalidArgument, what)
		}
	}
	require.Equal(t, before, peer.OpenFDs())
}

// A follower goes on with a publication whose tensors are in the same places, and ends otherwise.
func TestAFollowerComesBackToTheSameTensors(t *testing.T) {
	d := gputest.Software(t)
	path := filepath.Join(t.TempDir(), "d", "s")
	serve := func(o publish.PublishOptions) (end func()) {
		l, err := peer.Listen(filepath.Dir(path), "s", peer.Options{})
		require.NoError(t, err)
		s := publish.NewServer(publish.ServerOptions{})
		go func() { _ = s.Serve(t.Context(), l) }()
		a, err := vmm.NewArray[byte](d, vmm.BufferOptions{Reserve: 2 * mib})
		require.NoError(t, err)
		require.NoError(t, gputest.Err(a.Append(nil, pattern(4096))))
		p, err := publish.Array(s, "weights", a, o)
		require.NoError(t, err)
		require.NoError(t, p.Announce(peertest.Context(t), 4096))
		return func() {
			require.NoError(t, l.Close())
			require.NoError(t, s.Close())
			require.NoError(t, a.Close())
		}
	}
	end := serve(publish.PublishOptions{Manifest: layout()})
	k, err := publish.Dial(peertest.Context(t), path, publish.DialOptions{ComeBack: &publish.ComeBack{First: time.Millisecond}})
	require.NoError(t, err)
	closeLater(t, k)
	f, err := publish.Follow[byte](peertest.Context(t), k, d, "weights", publish.FollowOptions{})
	require.NoError(t, err)
	require.NoError(t, f.Next(peertest.Context(t)))
	first := f.Description()
	end()

	same := layout()
	same.Tensors[0].Digest = "crc32c:00000002"
	end = serve(publish.PublishOptions{Manifest: same})
	require.NoError(t, f.Next(peertest.Context(t)))
	require.Equal(t, same, f.Manifest())
	require.False(t, bytes.Equal(first, f.Description()))
	end()

	other := layout()
	other.Tensors[2].Strides, other.Tensors[2].Kind = []int{16, 1}, "buffer"
	end = serve(publish.PublishOptions{Manifest: other})
	err = f.Next(peertest.Context(t))
	require.ErrorIs(t, err, handles.ErrMismatch)
	require.ErrorContains(t, err, `tensor "head" has strides [16 1] instead of [1 32], kind "buffer" instead of ""`)
	require.Equal(t, same, f.Manifest())
	require.NoError(t, f.Close())
	end()
}
