package vmm_test

import (
	"errors"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// probe measures what other work sees.
type probe struct {
	*benchSleeper
	small  *vmm.Buffer
	page   *cuda.HostBuffer
	stream *cuda.Stream
	module *cuda.Module
	fill   *cuda.Kernel
}

func newProbe(s *benchSleeper) (p *probe) {
	p = &probe{benchSleeper: s}
	var err error
	p.small, err = vmm.NewBuffer(s.d, vmm.BufferOptions{Reserve: 2 * mib})
	require.NoError(s, err)
	require.NoError(s, p.small.Resize(nil, 4096))
	p.page, err = s.d.NewHostBuffer(4096)
	require.NoError(s, err)
	p.stream, err = s.d.NewStream(cuda.StreamOptions{})
	require.NoError(s, err)
	p.module, err = s.d.LoadModule(kernels.Basic)
	require.NoError(s, err)
	p.fill, err = p.module.Kernel(kernels.Fill)
	require.NoError(s, err)
	return p
}

func (p *probe) close() {
	for _, c := range []interface{ Close() error }{p.stream, p.page, p.small, p.module} {
		require.NoError(p, c.Close())
	}
}

// meanwhile repeats each use of the GPU on its own while during runs, and returns its times.
func (p *probe) meanwhile(during func(), use func() error) (all []time.Duration) {
	stop := make(chan struct{})
	var uses sync.WaitGroup
	uses.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			start := time.Now()
			if err := use(); err != nil {
				p.Error(err)
				return
			}
			all = append(all, time.Since(start))
			if len(all)%100 == 0 {
				if err := p.stream.Synchronize(); err != nil {
					p.Error(err)
					return
				}
			}
		}
	})
	during()
	close(stop)
	uses.Wait()
	return all
}

// out and in return the times of copies of 4 KiB, from the device and to it, while during runs.
func (p *probe) out(during func()) []time.Duration {
	return p.meanwhile(during, func() error {
		return errors.Join(p.stream.CopyToHost(p.page.All(), p.small.Ptr()), p.stream.Synchronize())
	})
}

func (p *probe) in(during func()) []time.Duration {
	return p.meanwhile(during, func() error {
		return errors.Join(p.stream.CopyFromHost(p.small.Ptr(), p.page.All()), p.stream.Synchronize())
	})
}

// launches returns the times of launches, which are not waited for, while during runs.
func (p *probe) launches(during func()) []time.Duration {
	return p.meanwhile(during, func() error {
		return p.fill.Launch(p.stream, cuda.Threads(1), p.small.Ptr(), uint64(1), uint32(1), uint32(0))
	})
}

// p99 returns the 99th percentile in microseconds.
func p99(times []time.Duration) float64 {
	return float64(percentile(times, 0.99).Nanoseconds()) / 1e3
}
