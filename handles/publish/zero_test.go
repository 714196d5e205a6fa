//go:build linux

package publish_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// A zero buffer, array or allocation has no memory to share, which is an error and no
// panic.
func TestZeroValuesAreNotShared(t *testing.T) {
	server := publish.NewServer(publish.ServerOptions{})
	defer func() { require.NoError(t, server.Close()) }()
	near, _ := peertest.Pair(t, peer.Options{})
	ctx := peertest.Context(t)
	for name, share := range map[string]func() error{
		"publish a buffer":   func() error { _, err := server.Publish("x", &vmm.Buffer{}); return err },
		"publish an array":   func() error { _, err := publish.Array(server, "x", &vmm.Array[int32]{}); return err },
		"send a buffer":      func() error { return handles.SendBuffer(ctx, near, &vmm.Buffer{}) },
		"send an array":      func() error { return handles.SendArray(ctx, near, &vmm.Array[int32]{}) },
		"lease a buffer":     func() error { _, err := handles.LeaseBuffer(&vmm.Buffer{}, handles.LeaseOptions{}); return err },
		"lease an array":     func() error { _, err := handles.LeaseArray(&vmm.Array[int32]{}, handles.LeaseOptions{}); return err },
		"publish with a nil": func() error { _, err := server.Publish("x", nil); return err },
		"take nothing over": func() error {
			_, err := publish.TakeOver[byte](ctx, server, nil, publish.TakeOverOptions{})
			return err
		},
	} {
		require.ErrorIs(t, share(), cuda.ErrInvalidArgument, name)
	}
}
