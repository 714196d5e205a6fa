package kernels

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write multimem.ptx anew")

// multimem.ptx is written by this file, since PTX has no macros and the
// instruction has a form for each type:
//
//	go test ./csrc/kernels -run TestMultimemText -update
func TestMultimemText(t *testing.T) {
	text := multimemText()
	if *update {
		require.NoError(t, os.WriteFile("multimem.ptx", []byte(text), 0o644))
		return
	}
	if text != string(Multimem) { // the whole of both would drown the message
		t.Fatal("multimem.ptx is not what this test writes: run it with -update")
	}
}

// The names are what the text declares, all of them, and each reduction's
// entry is what its element says.
func TestMultimemEntries(t *testing.T) {
	declared := map[string]bool{}
	for _, found := range regexp.MustCompile(`(?m)^\.visible \.entry (\w+)\(`).FindAllSubmatch(Multimem, -1) {
		require.False(t, declared[string(found[1])], "%s twice", found[1])
		declared[string(found[1])] = true
	}
	want := map[string]bool{Broadcast: true, Barrier: true, L2Norm: true}
	for _, e := range Elements() {
		want[e.AllReduce()], want[e.Red()] = true, true
	}
	require.Equal(t, want, declared)
}

// The text assembles for sm_90, where there is an assembler.
func TestMultimemAssembles(t *testing.T) {
	assembler, err := exec.LookPath("ptxas")
	if err != nil {
		if assembler, err = exec.LookPath("/usr/local/cuda/bin/ptxas"); err != nil {
			t.Skip("needs ptxas, of a CUDA toolkit")
		}
	}
	source := filepath.Join(t.TempDir(), "multimem.ptx")
	require.NoError(t, os.WriteFile(source, Multimem, 0o600))
	out, err := exec.Command(assembler, "-arch=sm_90", "-Werror", "-o", os.DevNull, source).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// form is how an element travels through the instructions.
type form struct {
	ptx   string // the instructions' type
	reg   string // the registers' type
	bytes int
	wide  bool // has a form of four registers
	acc   string
}

func formOf(e Element) form {
	switch e {
	case F32:
		return form{ptx: "f32", reg: "f32", bytes: 4, wide: true}
	case F16:
		return form{ptx: "f16x2", reg: "b32", bytes: 4, wide: true, acc: ".acc::f32"}
	case BF16:
		return form{ptx: "bf16x2", reg: "b32", bytes: 4, wide: true, acc: ".acc::f32"}
	case F64:
		return form{ptx: "f64", reg: "f64", bytes: 8}
	}
	return form{ptx: "u32", reg: "b32", bytes: 4}
}

func multimemText() string {
	var b strings.Builder
	b.WriteString(`// The kernels that reduce and broadcast through multicast addresses, for sm_90
// and later. Written by multimem_text_test.go: do not edit.
//
// A multicast address is touched by multimem instructions alone. Where one
// kernel also touches the same memory through a device's own address,
// fence.proxy.alias stands between the two.
//
// Units are the words that an instruction takes at least: 4 bytes for types of
// 16 and 32 bits (16-bit types come in pairs), 8 bytes for those of 64 bits.
// Launches are one-dimensional: thread i of all T takes the units i, i+T, i+2T
// and so on, so any launch does all of the work, but for the last two kernels,
// which are launched with one block.

.version 8.2
.target sm_90
.address_size 64
`)
	for _, e := range Elements() {
		b.WriteString(allReduceText(e))
		b.WriteString(redText(e))
	}
	b.WriteString(broadcastText())
	b.WriteString(barrierText)
	b.WriteString(normText)
	return b.String()
}

// loopText is a kernel that handles n units: four at a time, in 16 bytes, while
// there are so many, and the rest one by one. one and four are the bodies, with
// %at the offset in bytes.
func loopText(name, params, declare, load string, unit int, one, four string) string {
	shift := map[int]int{4: 2, 8: 3}[unit]
	var b strings.Builder
	fmt.Fprintf(&b, ".visible .entry %s(\n%s\n)\n{\n", name, params)
	b.WriteString("\t.reg .pred\t%done;\n")
	b.WriteString("\t.reg .b32\t%block, %width, %thread, %blocks;\n")
	b.WriteString("\t.reg .b64\t%first, %i, %stride, %end, %fours, %at, %a, %b, %pm, %ps;\n")
	b.WriteString(declare)
	b.WriteString("\n" + load)
	b.WriteString("\tld.param.u64\t%end, [n];\n\n")
	b.WriteString(`	mov.u32	%block, %ctaid.x;
	mov.u32	%width, %ntid.x;
	mov.u32	%thread, %tid.x;
	mov.u32	%blocks, %nctaid.x;
	cvt.u64.u32	%first, %thread;
	mul.wide.u32	%at, %block, %width;
	add.u64	%first, %first, %at;
	mul.wide.u32	%stride, %blocks, %width;
`)
	if four != "" {
		b.WriteString(`
	shr.u64	%fours, %end, 2;
	mov.u64	%i, %first;
four:
	setp.ge.u64	%done, %i, %fours;
	@%done bra	rest;
	shl.b64	%at, %i, 4;
` + four + `	add.u64	%i, %i, %stride;
	bra	four;

rest:
	shl.b64	%i, %fours, 2;
	add.u64	%i, %i, %first;
`)
	} else {
		b.WriteString("\n\tmov.u64\t%i, %first;\n")
	}
	b.WriteString(`one:
	setp.ge.u64	%done, %i, %end;
	@%done ret;
` + fmt.Sprintf("\tshl.b64\t%%at, %%i, %d;\n", shift) + one + `	add.u64	%i, %i, %stride;
	bra	one;
}
`)
	return b.String()
}

const (
	multicastParam = "\t.param .u64 mc,\n\t.param .u64 n"
	sourceParams   = "\t.param .u64 mc,\n\t.param .u64 src,\n\t.param .u64 n"
	loadMulticast  = "\tld.param.u64\t%pm, [mc];\n\tcvta.to.global.u64\t%pm, %pm;\n"
	loadSource     = loadMulticast + "\tld.param.u64\t%ps, [src];\n\tcvta.to.global.u64\t%ps, %ps;\n"
	fourRegisters  = "{%v0, %v1, %v2, %v3}"
)

func registers(f form) string {
	if f.wide {
		return fmt.Sprintf("\t.reg .%s\t%%v0, %%v1, %%v2, %%v3;\n", f.reg)
	}
	return fmt.Sprintf("\t.reg .%s\t%%v0;\n", f.reg)
}

func allReduceText(e Element) string {
	f := formOf(e)
	body := func(vec, regs string) string {
		return "\tadd.u64\t%a, %pm, %at;\n" +
			fmt.Sprintf("\tmultimem.ld_reduce.relaxed.sys.global.add%s%s.%s\t%s, [%%a];\n", f.acc, vec, f.ptx, regs) +
			fmt.Sprintf("\tmultimem.st.relaxed.sys.global%s.%s\t[%%a], %s;\n", vec, f.ptx, regs)
	}
	var four string
	if f.wide {
		four = body(".v4", fourRegisters)
	}
	return "\n// mc[i] = the sum of all replicas' element i, in every replica.\n" +
		loopText(e.AllReduce(), multicastParam, registers(f), loadMulticast, f.bytes, body("", "%v0"), four)
}

func redText(e Element) string {
	f := formOf(e)
	body := func(vec, regs string) string {
		return "\tadd.u64\t%a, %pm, %at;\n\tadd.u64\t%b, %ps, %at;\n" +
			fmt.Sprintf("\tld.global%s.%s\t%s, [%%b];\n", vec, f.reg, regs) +
			fmt.Sprintf("\tmultimem.red.relaxed.sys.global.add%s.%s\t[%%a], %s;\n", vec, f.ptx, regs)
	}
	var four string
	if f.wide {
		four = body(".v4", fourRegisters)
	}
	return "\n// mc[i] = the sum of mc[i] and src[i], in every replica.\n" +
		loopText(e.Red(), sourceParams, registers(f), loadSource, f.bytes, body("", "%v0"), four)
}

func broadcastText() string {
	f := form{ptx: "f32", reg: "f32", bytes: 4, wide: true}
	body := func(vec, regs string) string {
		return "\tadd.u64\t%a, %pm, %at;\n\tadd.u64\t%b, %ps, %at;\n" +
			fmt.Sprintf("\tld.global%s.f32\t%s, [%%b];\n", vec, regs) +
			fmt.Sprintf("\tmultimem.st.relaxed.sys.global%s.f32\t[%%a], %s;\n", vec, regs)
	}
	return "\n// mc[i] = src[i], words of 32 bits, in every replica. Nothing is computed, so\n" +
		"// any bits travel as they are.\n" +
		loopText(Broadcast, sourceParams, registers(f), loadSource, f.bytes, body("", "%v0"), body(".v4", fourRegisters))
}

var barrierText = `
// Adds one to the counter in every replica, and waits until this device's own
// counter is at least target (compared cyclically): until all have arrived.
// The wait also ends when the word at abort, mostly the host's memory, is not 0,
// which is looked at now and then; where it is so from the beginning the
// multicast address is not touched.
//
// What a thread did before in any kernel that came before on its stream is seen
// by the others behind their wait.
.visible .entry ` + Barrier + `(
	.param .u64 mc,
	.param .u64 own,
	.param .u32 target,
	.param .u64 abort
)
{
	.reg .pred	%p;
	.reg .b32	%thread, %block, %value, %until, %polls;
	.reg .b64	%pm, %pu, %pa;

	mov.u32	%thread, %tid.x;
	mov.u32	%block, %ctaid.x;
	or.b32	%thread, %thread, %block;
	setp.ne.u32	%p, %thread, 0;
	@%p ret;
	ld.param.u64	%pm, [mc];
	ld.param.u64	%pu, [own];
	ld.param.u32	%until, [target];
	ld.param.u64	%pa, [abort];
	cvta.to.global.u64	%pm, %pm;
	cvta.to.global.u64	%pu, %pu;
	cvta.to.global.u64	%pa, %pa;

` + arriveText("%pm", "%pu") + `	fence.acq_rel.sys;
	ret;
}
`

// arriveText adds one to every replica of a counter and waits at %until for its
// own, or leaves the kernel when the word at %pa says so.
func arriveText(counters, own string) string {
	return `	ld.relaxed.sys.global.u32	%value, [%pa];
	setp.ne.u32	%p, %value, 0;
	@%p ret;
	fence.acq_rel.sys;
	fence.proxy.alias;
	multimem.red.release.sys.global.add.u32	[` + counters + `], 1;
	fence.proxy.alias;
	mov.u32	%polls, 0;
wait:
	ld.acquire.sys.global.u32	%value, [` + own + `];
	sub.u32	%value, %value, %until;
	setp.ge.s32	%p, %value, 0;
	@%p bra	complete;
	add.u32	%polls, %polls, 1;
	and.b32	%value, %polls, 1023;
	setp.ne.u32	%p, %value, 0;
	@%p bra	wait;
	ld.relaxed.sys.global.u32	%value, [%pa];
	setp.eq.u32	%p, %value, 0;
	@%p bra	wait;
	ret;
complete:
	fence.proxy.alias;
`
}

var normText = `
// *out = the square root of the sum of x[i]*x[i] over all devices' x. Each
// device adds up its own part in its own replica of partial (a float64 that is
// zero before), arrives by adding one to every replica of arrived, waits for
// target arrivals, and reads the sum of all replicas of partial. partial and
// arrived are given twice, by the multicast address and by the device's own.
// abort is as in the barrier; out stays as it is then.
.visible .entry ` + L2Norm + `(
	.param .u64 x,
	.param .u64 n,
	.param .u64 partial_mc,
	.param .u64 partial,
	.param .u64 arrived_mc,
	.param .u64 arrived,
	.param .u32 target,
	.param .u64 out,
	.param .u64 abort
)
{
	.reg .pred	%p;
	.reg .b32	%thread, %width, %value, %until, %polls;
	.reg .b64	%px, %end, %i, %stride, %at, %pm, %pu, %am, %au, %pout, %pa;
	.reg .f32	%v;
	.reg .f64	%wide, %sum;

	ld.param.u64	%px, [x];
	ld.param.u64	%end, [n];
	ld.param.u64	%pm, [partial_mc];
	ld.param.u64	%pu, [partial];
	ld.param.u64	%am, [arrived_mc];
	ld.param.u64	%au, [arrived];
	ld.param.u32	%until, [target];
	ld.param.u64	%pout, [out];
	ld.param.u64	%pa, [abort];
	cvta.to.global.u64	%px, %px;
	cvta.to.global.u64	%pm, %pm;
	cvta.to.global.u64	%pu, %pu;
	cvta.to.global.u64	%am, %am;
	cvta.to.global.u64	%au, %au;
	cvta.to.global.u64	%pout, %pout;
	cvta.to.global.u64	%pa, %pa;

	mov.u32	%thread, %tid.x;
	mov.u32	%width, %ntid.x;
	cvt.u64.u32	%i, %thread;
	cvt.u64.u32	%stride, %width;
	mov.f64	%sum, 0d0000000000000000;
next:
	setp.ge.u64	%p, %i, %end;
	@%p bra	added;
	shl.b64	%at, %i, 2;
	add.u64	%at, %px, %at;
	ld.global.f32	%v, [%at];
	cvt.f64.f32	%wide, %v;
	fma.rn.f64	%sum, %wide, %wide, %sum;
	add.u64	%i, %i, %stride;
	bra	next;
added:
	red.global.add.f64	[%pu], %sum;
	bar.sync	0;

	setp.ne.u32	%p, %thread, 0;
	@%p ret;
` + arriveText("%am", "%au") + `	multimem.ld_reduce.relaxed.sys.global.add.f64	%sum, [%pm];
	sqrt.rn.f64	%sum, %sum;
	st.global.f64	[%pout], %sum;
	ret;
}
`
