//go:build linux

package handles

import (
	"context"
	"log/slog"
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// curious is a log whose handler looks at what it is told of.
type curious struct {
	slog.Handler
	look func()
}

func (c curious) Enabled(context.Context, slog.Level) bool { return true }

func (c curious) Handle(context.Context, slog.Record) error {
	c.look()
	return nil
}

// A handler of the program's may call TransfersOf when a downgrade is logged.
func TestTheLogOfADowngradeMayLookAtIt(t *testing.T) {
	var c carried
	seen := 0
	log := slog.New(curious{slog.DiscardHandler, func() { seen += c.now().Sent.Downgraded }})
	by := handleNegotiation{way: vmm.PosixFD, types: vmm.PosixFD | vmm.Fabric, reason: "no channel"}
	peertest.InTime(t, "note", func() error {
		c.note(&c.sent, by, log, "sent")
		c.note(&c.sent, by, log, "sent")
		return nil
	})
	require.Equal(t, 1, seen, "logged once")
	require.Equal(t, Carried{Descriptor: 2, Downgraded: 2, Reason: "no channel"}, c.now().Sent)
}

func TestTransfersOfNoConnection(t *testing.T) {
	require.Zero(t, TransfersOf(nil))
	require.Zero(t, TransfersOf(new(peer.Conn)))
}
