package sim

import (
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// h100 is the compiler for the usual device and driver.
var h100 = compiler{ptxNumber{9, 0}, 90}

func TestNewestPTX(t *testing.T) {
	for cuda, want := range map[int]string{10020: "6.2", 11020: "7.2", 12040: "8.4", 13000: "9.0", 13010: "9.1"} {
		require.Equal(t, want, newestPTX(cuda).String())
	}
}

func TestPTXDeclarations(t *testing.T) {
	head := ".version 8.0\n.target sm_90a, debug\n.address_size 64\n"
	for _, row := range []struct {
		text   string
		params []param
		size   uint64
	}{
		{".entry e() { ret; }", nil, 0},
		{".entry e { ret; }", nil, 0},
		{".entry e() { { .reg .b32 %r<2>; } out: }", nil, 0},
		{".file 1 \"a{b.cu\"\n.global .u32 x[2] = {1, 2};\n.extern .func f(.param .b64 p);\n.entry e() { ret; }\n.section .debug_abbrev { .b8 1; }\n", nil, 0},
		{".entry e(.param .u8 x);\n.func f() { ret; } .entry e() .minnctapersm 2 .pragma \"nounroll\" { ret; }", nil, 0},
		{".visible .entry e(.param .u64 a) .maxntid 128, 1, 1 { ret; }", []param{{0, 8}}, 8},
		{".entry e(.param .u8 a, .param .u64 b, .param .u16 c) {}", []param{{0, 1}, {8, 8}, {16, 2}}, 18},
		{".entry e(.param .align 16 .b8 a[24], .param .f32 b) {}", []param{{0, 24}, {24, 4}}, 28},
		{".entry e(.param .u32 a, .param .align 8 .b8 b[16]) {}", []param{{0, 4}, {8, 16}}, 24},
		{".entry e(\n\t.param .u64 .ptr .global .align 4 a, // in\n\t.param .u64 .ptr b\n) {}", []param{{0, 8}, {8, 8}}, 16},
	} {
		entries, err := parsePTX(head+row.text, h100)
		require.NoError(t, err, row.text)
		require.Equal(t, entry{name: "e", params: row.params, size: row.size}, entries["e"], row.text)
	}
	for _, bad := range []string{
		".entry e() {}",
		".version 8.0 .entry e() {}",
		head + ".entry",
		head + ".entry ( ) {}",
		head + ".entry 7up() {}",
		head + ".entry e(.param .u64 a { ret; }",
		head + ".entry e(.param .u64 a) ret; }",
		head + ".entry e(.param .u64 a) maxntid 128 { ret; }",
		head + ".entry e()",
		head + ".entry e() { ret;",
		head + ".entry e() { ret }",
		head + ".entry e() { { ret; }",
		head + ".entry e() { ret; .entry f() { ret; } }",
		head + ".entry e() {} .entry e() {}",
		head + ".entry e(.param .pred p) {}",
		head + ".entry e(u64 p) {}",
		head + ".entry e(.param .align 3 .b8 p[4]) {}",
		head + ".entry e(.param .b8 p[99999999999]) {}",
		".version 8.0\n.target sm_99999999999999999999\n.entry e() {}",
		".version 99999999999999999999.0\n.target sm_90\n.entry e() {}",
		".version 8.0\n.target sm_90\n.address_size 32\n.entry e() {}",
	} {
		_, err := parsePTX(bad, h100)
		require.Error(t, err, bad)
	}
}

func FuzzPTX(f *testing.F) {
	f.Add(testPTX)
	f.Add(".version 1.0 .target sm_1 .entry e(.param .align 8 .b8 x[3], .param .u64 .ptr y) { { ret; } }")
	f.Fuzz(func(t *testing.T, text string) {
		entries, err := parsePTX(text, h100)
		if err != nil {
			return
		}
		for _, e := range entries {
			end := uint64(0)
			for _, p := range e.params {
				require.GreaterOrEqual(t, p.offset, end)
				end = p.offset + p.size
			}
			require.Equal(t, end, e.size)
		}
	})
}

func TestModuleRules(t *testing.T) {
	r := start(t, Options{})
	load := func(image string) driver.Result {
		_, res := r.ModuleLoadData(r.ctx, []byte(image))
		return res
	}
	r.is(driver.NoBinaryForGPU, load("\x7fELF\x02\x01"))
	r.is(driver.InvalidImage, load("nothing"))
	r.is(driver.InvalidImage, load(""))
	r.is(driver.InvalidPTX, load(".version 7.0\n.entry e() {}"))
	r.is(driver.InvalidPTX, load(strings.Replace(testPTX, "sm_70", "sm_120", 1)))
	m, res := r.ModuleLoadData(r.ctx, []byte(testPTX))
	r.ok(res)
	_, res = r.ModuleGetFunction(r.ctx, m, "absent")
	r.is(driver.NotFound, res)
	_, res = r.ModuleGetFunction(r.ctx, m, "nor_this")
	r.is(driver.NotFound, res)
	_, res = r.ModuleGetFunction(r.ctx, m, "sim_test_no_twin")
	r.is(driver.NotSupported, res)
	require.Contains(t, strings.Join(r.m.Log(), "\n"), "RegisterKernel")
	f, res := r.ModuleGetFunction(r.ctx, m, "sim_test_panic")
	r.ok(res)
	r.ok(r.ModuleUnload(r.ctx, m))
	r.is(driver.InvalidHandle, r.ModuleUnload(r.ctx, m))
	_, res = r.ModuleGetFunction(r.ctx, m, "sim_test_panic")
	r.is(driver.InvalidHandle, res)
	r.is(driver.InvalidHandle, r.LaunchKernel(r.ctx, f, one, nil, 0))
}
