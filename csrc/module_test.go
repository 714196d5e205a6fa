//go:build linux && cgo && (amd64 || arm64) && !cuvmm_nocgo

package csrc_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

func TestModuleImages(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	long := strings.Repeat("x", 200)
	for _, c := range []struct {
		name, image, want string
	}{
		{"text without its NUL", ".version 8.0", ".version 8.0\x00"},
		{"text with its NUL", ".version 8.0\x00", ".version 8.0\x00"},
		{"text with a NUL inside ends there", ".ver\x00sion", ".ver\x00"},
		{"an ELF image", "\x7fELF\x02\x01" + long, "\x7fELF"},
		{"a fat binary", "\x50\xed\x55\xba\x01" + long, "\x50\xed\x55\xba"},
		{"shorter than any mark", "abc", "abc\x00"},
		{"the start of a mark", "\x7fEL", "\x7fEL\x00"},
	} {
		t.Run(c.name, func(t *testing.T) {
			// A part of a larger slice: what follows it must not be read as text.
			image := append([]byte(c.image), "behind"...)[:len(c.image)]
			m, r := d.ModuleLoadData(ours, image)
			require.Equal(t, driver.Success, r)
			require.Equal(t, driver.Module(0x3000000001), m)
			require.Equal(t, c.want, string(f.calls(t)[3].Args))
		})
	}
}

func TestModuleOfNothing(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	for _, image := range [][]byte{nil, {}} {
		f.returns("cuModuleLoadData", driver.InvalidImage)
		_, r := d.ModuleLoadData(ours, image)
		require.Equal(t, driver.InvalidImage, r, "the driver was called, with an empty text")
		require.Equal(t, []byte{0}, f.calls(t)[3].Args)
	}
}

// A cooperative launch has a list of parameters where the driver tells where they
// lie and all of them lie in the block, and else the block.
func TestParametersOfACooperativeLaunch(t *testing.T) {
	for _, c := range []struct {
		name    string
		defines []string
		block   string
		listed  bool
	}{
		{"a list", nil, "packed parameters", true},
		{"more than the kernel declares", nil, "packed parameters, and more", true},
		{"less than the kernel declares", nil, "packed parameter", false},
		{"a driver that does not tell of all", []string{"FAKECUDA_HIDES_PARAMS"}, "packed parameters", false},
		{"a driver that lists none, as of a binary without a list", []string{"FAKECUDA_PARAMS=0"}, "packed parameters", false},
		{"an older driver", []string{`FAKECUDA_MISSING="cuFuncGetParamInfo"`}, "packed parameters", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := buildFake(t, c.defines...)
			d := f.open(t)
			require.Equal(t, driver.Success, d.LaunchKernelEx(ours, 0x3000000002, driver.LaunchConfig{GridX: 1}, []byte(c.block), 0))
			calls := f.calls(t)
			args := calls[slices.Index(entries(calls), "cuLaunchKernelEx")].Args
			size := uint64(len(c.block))
			block := append(append(le(uint64(0), uint64(1)), c.block...), le(uint64(2), size, uint64(0))...)
			list := append([]byte(c.block[:min(17, len(c.block))]), le(uint64(0))...)
			require.Equal(t, c.listed, bytes.HasSuffix(args, list))
			require.Equal(t, !c.listed, bytes.HasSuffix(args, block))
		})
	}
}

// As many parameters as the list has room for are passed as a list, and more as a block.
func TestManyParametersOfACooperativeLaunch(t *testing.T) {
	for n, listed := range map[int]bool{256: true, 257: false} {
		f := buildFake(t, fmt.Sprintf("FAKECUDA_PARAMS=%d", n))
		d := f.open(t)
		block := bytes.Repeat([]byte{7}, n)
		require.Equal(t, driver.Success, d.LaunchKernelEx(ours, 0x3000000002, driver.LaunchConfig{GridX: 1}, block, 0))
		calls := f.calls(t)
		args := calls[slices.Index(entries(calls), "cuLaunchKernelEx")].Args
		require.Equal(t, listed, bytes.HasSuffix(args, le(block[:9], uint64(0))), n) // what the fake reads of a list
	}
}

// What the compiler says comes back, as much of it as there is room for.
func TestTheCompilersLog(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	for _, c := range []struct {
		room int
		want string
	}{{64, "line 1; error   : \n\x00"}, {7, "line 1\x00"}, {1, "\x00"}} {
		log := bytes.Repeat([]byte{0xff}, c.room)
		f.returns("cuModuleLoadDataEx", driver.InvalidPTX)
		_, r := d.ModuleLoadDataEx(ours, []byte("text"), log)
		require.Equal(t, driver.InvalidPTX, r)
		require.Equal(t, c.want, string(log[:len(c.want)]))
		f.returns("cuModuleLoadDataEx", driver.Success)
		_, r = d.ModuleLoadDataEx(ours, []byte("text"), log)
		require.Equal(t, driver.Success, r)
		require.Zero(t, log[0], "nothing is left of an earlier one")
	}
}

func TestFunctionNames(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	for _, name := range []string{"", "f", strings.Repeat("n", 240)} {
		_, r := d.ModuleGetFunction(ours, module, name)
		require.Equal(t, driver.Success, r)
		require.Equal(t, le(module, []byte(name), uint8(0)), f.calls(t)[3].Args)
	}
}

// A kernel without parameters gets no list: an empty block is not one.
func TestLaunchWithoutParameters(t *testing.T) {
	f := buildFake(t)
	d := f.open(t)
	require.Equal(t, driver.Success, d.LaunchKernel(ours, fn, launch, nil, stream))
	require.Equal(t, le(fn, uint32(11), uint32(12), uint32(13), uint32(21), uint32(22), uint32(23), uint32(31), stream, uint64(0)),
		f.calls(t)[3].Args)
}
