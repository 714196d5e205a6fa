// Command 04-pool takes blocks from a pool and frees them while the GPU still
// works on them. It shows what a pool is for: memory that is freed serves the
// next request at once, and free chunks that lie apart serve a larger request
// together, without a copy.
//
//	go run ./samples/04-pool [-driver auto|real|sim]
package main

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/samples/internal/app"
	"github.com/cuvmm/cuvmm/vmm/pool"
)

const mib = 1 << 20

var sample = app.Sample{
	Name:  "04-pool",
	Shows: "a pool: frees that wait for nothing, holes that are closed without copying",
	Next:  "05-pool-capture: a graph whose memory comes from the pool",
	Run:   run,
}

func main() { app.Main(sample) }

func run(e *app.Env) (err error) {
	if err := e.Open(); err != nil {
		return err
	}
	s, err := e.Device.NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer app.Close(s, &err)
	// Small chunks keep the sample small: the default of 32 MiB suits programs.
	p, err := pool.New(e.Device, pool.Options{Chunk: 2 * mib})
	if err != nil {
		return err
	}
	defer app.Close(p, &err)
	defer func() { err = errors.Join(err, freeAll(p)) }() // a pool with live blocks stays open

	// The GPU still fills the block when it is freed. The next request of the
	// stream has the same memory: its work comes behind the fill.
	first, err := filled(p, s, 1)
	if err != nil {
		return err
	}
	if err := p.Free(first); err != nil {
		return err
	}
	var blocks [4]pool.Block
	for i := range blocks {
		if blocks[i], err = filled(p, s, byte(i)); err != nil {
			return err
		}
	}
	e.Line("reused", "%v: freed in use, and the stream's next block: %v", first.Ptr(), blocks[0].Ptr() == first.Ptr())
	e.Line("live", "%d blocks of 8 MiB, in %d MiB of memory", len(blocks), p.Stats().Reserved/mib)

	// Two holes of 8 MiB that are not neighbors serve one request of 16 MiB: the
	// pool maps their chunks side by side at another address.
	for _, i := range []int{0, 2} {
		if err := p.Free(blocks[i]); err != nil {
			return err
		}
	}
	large, err := p.Alloc(pool.Request{Bytes: 16 * mib, Stream: s})
	if err != nil {
		return err
	}
	e.Line("stitched", "16 MiB of two holes, still in %d MiB of memory", p.Stats().Reserved/mib)
	if err := s.Memset(large.Ptr(), 9, large.Bytes()); err != nil {
		return err
	}
	for _, i := range []int{1, 3} {
		if err := verify(s, blocks[i], byte(i)); err != nil {
			return err
		}
	}
	if err := verify(s, large, 9); err != nil {
		return err
	}
	e.Line("verified", "every block holds its own bytes")

	if err := freeAll(p); err != nil {
		return err
	}
	freed, err := p.Trim(0)
	if err != nil {
		return err
	}
	e.Line("trimmed", "%d MiB went back to the driver, %d MiB stay", freed/mib, p.Stats().Reserved/mib)
	return nil
}

// filled returns a block of 8 MiB that the stream fills with one value.
func filled(p *pool.Pool, s *cuda.Stream, value byte) (pool.Block, error) {
	b, err := p.Alloc(pool.Request{Bytes: 8 * mib, Stream: s})
	if err != nil {
		return b, err
	}
	return b, s.Memset(b.Ptr(), value, b.Bytes())
}

func freeAll(p *pool.Pool) (err error) {
	for _, live := range p.Live() {
		err = errors.Join(err, p.Free(live.Block))
	}
	return err
}

// verify reads a block back.
func verify(s *cuda.Stream, b pool.Block, want byte) error {
	got := make([]byte, b.Bytes())
	if err := s.Download(got, b.Ptr()); err != nil {
		return err
	}
	if n := bytes.Count(got, []byte{want}); n != len(got) {
		return fmt.Errorf("%d of %d bytes at %v are not %d", len(got)-n, len(got), b.Ptr(), want)
	}
	return nil
}
