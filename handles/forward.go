package handles

import (
	"context"
	"fmt"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
)

// SendFDs shares memory that this process has as file descriptors alone: d describes it, and fds has
// the descriptor of each of its chunks. The peer receives it as from [SendBuffer], or from [SendArray]
// if it is an array's. No driver is needed: a descriptor keeps its memory, with every byte, though no
// process has it mapped. The descriptors stay the caller's, and are open until SendFDs returns.
//
// A descriptor that came with another process's memory is as good as the first
// (ImportOptions.KeepDescriptors, or a message of the program); one that was made of imported memory
// is not, because the driver exports no imports.
func SendFDs(ctx context.Context, c *peer.Conn, d Descriptor, fds []*peer.FD) error {
	const op = "handles.SendFDs"
	if err := d.check(op); err != nil {
		return err
	}
	switch {
	case d.Handle&vmm.PosixFD == 0:
		return errs.PeerInvalid(op, fmt.Sprintf("memory by %v", d.Handle), "describe memory that has descriptors (vmm.PosixFD)")
	case len(fds) != len(d.Chunks):
		return errs.PeerInvalid(op, fmt.Sprintf("%s for %s", errs.Count(len(fds), "file descriptor"), errs.Count(len(d.Chunks), "chunk")),
			"pass one for each chunk, in the order of the chunks")
	}
	in, err := connOf(op, c)
	if err != nil {
		return err
	}
	defer in.Release()
	if err := in.turn(ctx, op, in.offering); err != nil {
		return in.refuse(ctx, op, err)
	}
	defer in.offering.Give()
	return in.offer(ctx, op, &d, func(ctx context.Context, t uint32, sent int) (int, error) {
		some := fds[sent:min(len(fds), sent+wire.MaxBatch)]
		return len(some), in.Send(ctx, op, message{kind: wire.Chunks, transfer: t, count: uint32(sent), fds: some}.pack())
	})
}
