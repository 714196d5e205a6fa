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
	// MeetKernel adds one to the 32-bit word at the address that is its first
	// parameter and waits until that is the second parameter: blocks that all do so
	// must run at once. Each block then reads back what it wrote to the last of the
	// bytes of dynamic shared memory, of which the third parameter says how many
	// there are, and adds one to the next word.
	MeetKernel = "cuvmm_conformance_meet"
	// CounterVariable is a 64-bit variable of the module that begins as 7, with four
	// bytes behind it that do so as 1 to 4.
	CounterVariable = "cuvmm_conformance_counter"
	// BytesVariable are those.
	BytesVariable = "cuvmm_conformance_bytes"
)

// kernelText runs on every GPU with virtual memory management.
const kernelText = `.version 6.0
.target sm_50
.address_size 64

.visible .global .align 8 .u64 ` + CounterVariable + ` = 7;
.visible .const .align 4 .b8 ` + BytesVariable + `[8] = {1, 2, 3, 4};
.extern .shared .align 16 .b8 dynamic[];

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

.visible .entry ` + MeetKernel + `(.param .u64 address, .param .u32 blocks, .param .u32 bytes)
{
	.reg .b64 %word;
	.reg .b32 %all, %value, %last, %base, %block;
	.reg .pred %is;
	ld.param.u64 %word, [address];
	ld.param.u32 %all, [blocks];
	ld.param.u32 %last, [bytes];
	mov.u32 %base, dynamic;
	add.u32 %last, %last, %base;
	mov.u32 %block, %ctaid.x;
	st.volatile.shared.u32 [%last+-4], %block;
	atom.global.add.u32 %value, [%word], 1;
meet:
	ld.volatile.global.u32 %value, [%word];
	setp.lt.u32 %is, %value, %all;
	@%is bra meet;
	ld.volatile.shared.u32 %value, [%last+-4];
	setp.ne.u32 %is, %value, %block;
	@%is bra done;
	atom.global.add.u32 %value, [%word+4], 1;
done:
	ret;
}
`

// kernels are the suite's kernels in one context.
type kernels struct {
	module        driver.Module
	nothing, hold driver.Function
	meet          driver.Function
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
	if k.meet, r = d.ModuleGetFunction(c, k.module, MeetKernel); r != driver.Success {
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
