package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/vmm"
)

// keep publishes memory of a broker as an array of uint32, when the process before has ended, and
// serves a socket. New memory, and half-written if incomplete is set, gets elements that are all 0,
// which it announces.
func (p *program) keep(ctx context.Context, at, socket, name string, length int, incomplete bool) (said string, err error) {
	k, err := broker.Dial(ctx, at, broker.DialOptions{Wait: true})
	if err != nil {
		return "", err
	}
	p.kept = append(p.kept, k)
	kept, err := k.Keep(ctx, p.dev, name, broker.KeepOptions{Bytes: 4 * length, Wait: true})
	if err != nil {
		return "", err
	}
	p.kept = append(p.kept, kept)
	a, err := vmm.ArrayOf[uint32](kept.Buffer())
	if err != nil {
		return "", err
	}
	shown, err := publish.Array(p.server, name, a, publish.PublishOptions{Page: kept.Page(), Incomplete: incomplete})
	if errors.Is(err, publish.ErrIncomplete) {
		return "incomplete", nil
	}
	if err != nil {
		return "", err
	}
	p.shown[name], p.arrays[name] = shown, a
	found := shown.Stats()
	if found.Generation == 0 || found.Rewriting {
		err = errors.Join(p.stream.Memset(a.Ptr(), 0, 4*length), shown.Announce(ctx, length, p.stream))
	}
	return fmt.Sprint(found.Generation > 0, " ", found.Rewriting), errors.Join(err, p.serve(ctx, filepath.Dir(socket), filepath.Base(socket)))
}
