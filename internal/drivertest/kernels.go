package drivertest

import (
	"encoding/binary"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// The entries of the suite's kernels. Where kernels are Go functions, the
// package that runs the suite registers theirs.
const (
	// NothingKernel does nothing.
	NothingKernel = "cuvmm_conformance_nothing"
	// HoldKernel runs until the 64-bit word at the address that is its one
	// parameter is other than zero.
	HoldKernel = "cuvmm_conformance_hold"
)

// kernelText runs on every GPU with virtual memory management.
const kernelText = `.version 6.0
.target sm_50
.address_size 64

.visible .entry ` + NothingKernel + `()
{
	ret;
}

.visible .entry ` + HoldKernel + `(.param .u64 address)
{
	.reg .b64 %word, %value;
	.reg .pred %again;
	ld.param.u64 %word, [address];
poll:
	ld.volatile.u64 %value, [%word];
	setp.eq.s64 %again, %value, 0;
	@%again bra poll;
	ret;
}
`

// kernels are the suite's kernels in one context.
type kernels struct {
	module        driver.Module
	nothing, hold driver.Function
}

// loadKernels loads them and launches each once, with the address of a word
// that is written already: the driver may load code at its first launch, and
// wait for running work to do so.
func loadKernels(d driver.Driver, c driver.Context, s driver.Stream, written driver.Ptr) (k kernels, r driver.Result) {
	if k.module, r = d.ModuleLoadData(c, []byte(kernelText)); r != driver.Success {
		return k, r
	}
	if k.nothing, r = d.ModuleGetFunction(c, k.module, NothingKernel); r != driver.Success {
		return k, r
	}
	if k.hold, r = d.ModuleGetFunction(c, k.module, HoldKernel); r != driver.Success {
		return k, r
	}
	if r = k.launchNothing(d, c, s); r != driver.Success {
		return k, r
	}
	if r = k.launchHold(d, c, s, written); r != driver.Success {
		return k, r
	}
	return k, d.StreamSynchronize(c, s)
}

var oneThread = driver.LaunchConfig{GridX: 1, GridY: 1, GridZ: 1, BlockX: 1, BlockY: 1, BlockZ: 1}

func (k kernels) launchNothing(d driver.Driver, c driver.Context, s driver.Stream) driver.Result {
	return d.LaunchKernel(c, k.nothing, oneThread, nil, s)
}

func (k kernels) launchHold(d driver.Driver, c driver.Context, s driver.Stream, word driver.Ptr) driver.Result {
	return d.LaunchKernel(c, k.hold, oneThread, binary.NativeEndian.AppendUint64(nil, uint64(word)), s)
}

// kernelsOf are the kernels in a context: the suite's, or the case's own.
func (t *T) kernelsOf(c driver.Context) kernels {
	t.Helper()
	if c == t.ctx {
		return t.kernels
	}
	if k, ok := t.loaded[c]; ok {
		return k
	}
	s := t.newStream(c, driver.StreamNonBlocking)
	k, r := loadKernels(t.D, c, s, t.holds.device)
	t.ok(r, "loading the suite's kernels")
	t.own("module", uint64(k.module), func() driver.Result { return t.D.ModuleUnload(c, k.module) })
	t.loaded[c] = k
	return k
}
