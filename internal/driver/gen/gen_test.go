package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheGeneratedFilesAreFresh(t *testing.T) {
	if _, err := os.Stat("../driver.go"); err != nil {
		t.Skip("the repository's sources are not here: this test binary runs away from its checkout")
	}
	table, err := readTable("..")
	require.NoError(t, err)
	require.NoError(t, table.readHandExports("../../../cmd/libcuda"))
	files, err := table.generate()
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for path, want := range files {
		got, err := os.ReadFile(filepath.Join("..", path))
		require.NoError(t, err)
		if string(want) != string(got) {
			t.Errorf("%s is not what the table makes: run go generate ./internal/driver", filepath.Join("internal/driver", path))
		}
	}
}

const header = "package driver\n\nimport \"unsafe\"\n\ntype Ptr uint64\ntype Context uintptr\ntype Stream uintptr\ntype Location struct{}\ntype AllocationProp struct{}\ntype UUID [16]byte\ntype Flags uint32\n\n"

func parse(methods string) (*table, error) {
	t := &table{kinds: map[string]string{}}
	if err := t.read("driver.go", []byte(header+"type Driver interface {\n"+methods+"\n}\n")); err != nil {
		return nil, err
	}
	return t, t.check()
}

func TestARow(t *testing.T) {
	table, err := parse(`
//cu:entry 12010 cuThing(uint64_t *p, size_t n, const cuvmm_prop *prop, const uint64_t *list, size_t count=len(list,more), const size_t *more, uint32_t flags=0)
Thing(c Context, n uint64, prop AllocationProp, list []Ptr, more []uint64) Result`)
	require.ErrorContains(t, err, "p is neither a parameter nor a result")
	require.NotNil(t, table)

	table, err = parse(`
//cu:entry 12010 cuThing_v3(size_t n, const cuvmm_prop *prop, const uint64_t *list, size_t count=len(list,more), const size_t *more, uint32_t flags=0)
Thing(c Context, n uint64, prop AllocationProp, list []Ptr, more []uint64) Result
//cu:entry 2000 bare cuAsk(uint32_t *flags)
Ask() (flags Flags, r Result)
//cu:entry 2000 asking cuLook(uintptr_t s, uint32_t *flags)
Look(c Context, s Stream) (flags Flags, r Result)`)
	require.NoError(t, err)
	files, err := table.generate()
	require.NoError(t, err)
	require.Contains(t, string(files["../../csrc/entries.h"]),
		"    int32_t (*cuThing)(size_t n, const cuvmm_prop *prop, const uint64_t *list, size_t count, const size_t *more,\n        uint32_t flags);\n    int32_t (*cuAsk)(uint32_t *flags);\n")
	require.Contains(t, string(files["../../csrc/calls.c"]),
		"int32_t cuvmm_Thing(cuvmm_driver drv, uintptr_t ctx, size_t n, const cuvmm_prop *prop, const uint64_t *list,\n        size_t list_n, const size_t *more) {\n"+
			"    CUVMM_CALL(drv, ctx, cuThing, (n, prop, list, list_n, more, 0));\n    return result;\n}\n")
	require.Contains(t, string(files["../../csrc/calls.c"]),
		"cuvmm_value cuvmm_Ask(cuvmm_driver drv) {\n    uint32_t flags = 0;\n    CUVMM_BARE_CALL(drv, cuAsk, (&flags));\n    return (cuvmm_value){(uint64_t)flags, result};\n}\n")
	require.Contains(t, string(files["../../csrc/calls.c"]), "    CUVMM_ASKING_CALL(drv, ctx, s, cuLook, (s, &flags));\n")
	require.Contains(t, string(files["../../csrc/calls.go"]), "if len(list) != len(more) {\n\t\treturn driver.InvalidValue\n\t}\n")
	require.Contains(t, string(files["calls.go"]), "CallThing Call = iota\n\tCallAsk\n")
	require.Contains(t, string(files["../../csrc/directives.go"]), "#cgo noescape cuvmm_Thing\n#cgo nocallback cuvmm_Thing\n")
	require.Contains(t, string(files["../../cmd/libcuda/exports.c"]),
		"    int32_t r = cuvmm_enter_thread();\n    return r != 0 ? r : cuvmm_sim_Thing(n, (cuvmm_prop *)prop, (uint64_t *)list, count, (size_t *)more, flags);\n")
	require.Contains(t, string(files["../../cmd/libcuda/exports.c"]), "    {\"cuThing\", 12010, (cuvmm_function)cuThing_v3},\n")
	require.Contains(t, string(files["../../cmd/libcuda/exports.go"]),
		"\tif prop == nil || count > longest || list == nil && count != 0 || more == nil && count != 0 || flags != 0 {\n")
	require.Contains(t, string(files["../../cmd/libcuda/exports.go"]),
		"lib.Thing(0, uint64(n), *(*driver.AllocationProp)(unsafe.Pointer(prop)), unsafe.Slice((*driver.Ptr)(unsafe.Pointer(list)), count), unsafe.Slice((*uint64)(unsafe.Pointer(more)), count))")
}

// A row by hand needs its function among the exports.
func TestHandExports(t *testing.T) {
	table, err := parse("//cu:hand 2000 cuThing()\nThing() Result")
	require.NoError(t, err)
	dir := t.TempDir()
	require.ErrorContains(t, table.readHandExports(dir), "//export cuvmm_sim_Thing")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a.go"), []byte("package main\n\n//export cuvmm_sim_Thing\n"), 0o600))
	require.NoError(t, table.readHandExports(dir))
	files, err := table.generate()
	require.NoError(t, err)
	require.NotContains(t, string(files["../../cmd/libcuda/exports.go"]), "Thing")
}

// A slip in a row ends in the generator, with the remedy.
func TestRowsThatAreRefused(t *testing.T) {
	for _, c := range []struct{ name, row, want string }{
		{"no version", "//cu:entry cuThing()\nThing() Result", "is not of the form"},
		{"no name", "//cu:entry 2000 cuThing(uint32_t)\nThing() Result", `"uint32_t" is no parameter`},
		{"no result", "//cu:entry 2000 cuThing()\nThing() uint64", "is no Result"},
		{"a parameter that is not passed", "//cu:entry 2000 cuThing()\nThing(n uint64) Result", `"n" is not among the parameters of cuThing`},
		{"a parameter without a value", "//cu:entry 2000 cuThing(uint32_t flags)\nThing() Result", "give it a value"},
		{"too narrow", "//cu:entry 2000 cuThing(uint32_t n)\nThing(n uint64) Result", `n is a uint64 in Go and a "uint32_t" in C`},
		{"signed", "//cu:entry 2000 cuThing(int32_t n)\nThing(n Flags) Result", `n is a Flags in Go and a "int32_t" in C`},
		{"a value for a slice", "//cu:entry 2000 cuThing(uint64_t list)\nThing(list []Ptr) Result", "list is a []Ptr in Go"},
		{"a slice of another width", "//cu:entry 2000 cuThing(const uint32_t *list)\nThing(list []Ptr) Result", "list is a []Ptr in Go"},
		{"another struct", "//cu:entry 2000 cuThing(const cuvmm_prop *l)\nThing(l Location) Result", "l is a Location in Go"},
		{"a struct that the driver writes", "//cu:entry 2000 cuThing(cuvmm_prop *p)\nThing(p AllocationProp) Result", "p is a AllocationProp in Go"},
		{"a result by value", "//cu:entry 2000 cuThing(uint64_t p)\nThing() (p Ptr, r Result)", "must be a pointer"},
		{"a result of another kind", "//cu:entry 2000 cuThing(float *p)\nThing() (p Ptr, r Result)", "the result p is a Ptr in Go"},
		{"a struct beside another result", "//cu:entry 2000 cuThing(cuvmm_uuid *u, uint64_t *p)\nThing() (u UUID, p Ptr, r Result)", "the result u is a UUID in Go"},
		{"the length of a number", "//cu:entry 2000 cuThing(uint64_t n, size_t count=len(n))\nThing(n uint64) Result", `"n" is no slice`},
		{"a name of the generator's", "//cu:entry 2000 cuThing(uint64_t ctx)\nThing(ctx uint64) Result", "choose another"},
		{"a bare call in a context", "//cu:entry 2000 bare cuThing()\nThing(c Context) Result", "a bare call takes no context"},
		{"an asking call without a stream", "//cu:entry 2000 asking cuThing()\nThing(c Context) Result", "an asking call takes a context, and a stream"},
		{"twice", "//cu:entry 2000 cuThing()\nThing() Result\n//cu:entry 2000 cuThing()\nOther() Result", "cuThing stands twice"},
		{"none", "Thing() Result", "no entry points"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := parse(c.row)
			require.ErrorContains(t, err, c.want)
		})
	}
}
