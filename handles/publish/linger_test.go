//go:build linux

package publish

import (
	"context"
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
)

// A server closes in time even if clients sent it files whose close takes as long as
// they like.
func TestFilesThatAreLongInClosing(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	for range 3 {
		near, far := peertest.Pair(t, peer.Options{})
		peertest.SendLingering(t, far, pack(&list{1})) // before the server reads, so that it has the last one
		go func() { _ = v.server.ServeConn(context.Background(), near) }()
	}
	v.served()
	peertest.InTime(t, "Server.Close", v.server.Close)
}
