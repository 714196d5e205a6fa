package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// The exports of cmd/libcuda are made in two layers. exports.c has the entry
// points as programs see them: each readies its thread and calls a Go function.
// exports.go has the Go functions of the rows; functions with a rule of
// their own stand in other files of the folder. exports.h declares the entry points for
// composed.c, which makes others of them.

var exportLine = regexp.MustCompile(`(?m)^//export cuvmm_sim_(\w+)$`)

// readHandExports finds the Go functions of cmd/libcuda that are written by hand.
func (t *table) readHandExports(dir string) error {
	t.handExports = map[string]bool{}
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return err
	}
	for _, name := range files {
		if filepath.Base(name) == "exports.go" {
			continue
		}
		src, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		for _, m := range exportLine.FindAllStringSubmatch(string(src), -1) {
			t.handExports[m[1]] = true
		}
	}
	for _, e := range t.entries {
		if e.hand && !t.handExports[e.method] {
			return fmt.Errorf("%s is written by hand, and no file of cmd/libcuda has the line //export cuvmm_sim_%[1]s", e.method)
		}
	}
	return nil
}

// declareExport declares an entry point as programs see it.
func (e *entry) declareExport(b *bytes.Buffer, end string) {
	params := []string{"void"}
	if len(e.declared) > 0 {
		params = nil
	}
	for _, c := range e.declared {
		params = append(params, declare(c.typ, c.name))
	}
	wrap(b, fmt.Sprintf("int32_t %s(", e.symbol), params, ")"+end)
}

// exportsH declares the entry points.
func (t *table) exportsH() []byte {
	var b bytes.Buffer
	b.WriteString(notice + built + "#ifndef CUVMM_EXPORTS_H\n#define CUVMM_EXPORTS_H\n\n#include \"libcuda.h\"\n\n")
	for _, e := range t.entries {
		e.declareExport(&b, ";\n")
	}
	b.WriteString("\n#endif\n")
	return b.Bytes()
}

// exportsC defines the entry points, and lists them by name and version.
func (t *table) exportsC() []byte {
	var b bytes.Buffer
	b.WriteString(notice + built + "#include \"exports.h\"\n\n#include \"_cgo_export.h\"\n\n")
	for _, e := range t.entries {
		var args []string
		for _, c := range e.declared {
			arg := c.name
			if f, in := find(e.params, c.name); in && f.typ == "unsafe.Pointer" {
				arg = "cuvmm_host(" + arg + ")"
			} else if typ, ok := strings.CutPrefix(c.typ, "const "); ok {
				arg = "(" + typ + ")" + arg
			}
			args = append(args, arg)
		}
		e.declareExport(&b, " {\n")
		b.WriteString("    int32_t r = cuvmm_enter_thread();\n")
		wrap(&b, fmt.Sprintf("    return r != 0 ? r : cuvmm_sim_%s(", e.method), args, ");\n")
		b.WriteString("}\n\n")
	}
	b.WriteString("const cuvmm_export cuvmm_exports[] = {\n")
	for _, e := range t.entries {
		fmt.Fprintf(&b, "    {%q, %s, (cuvmm_function)%s},\n", strings.TrimSuffix(e.name, "_v1"), e.version, e.symbol)
	}
	b.WriteString("};\n\nconst size_t cuvmm_exports_n = sizeof cuvmm_exports / sizeof *cuvmm_exports;\n")
	resultsC(&b)
	return b.Bytes()
}

// resultsC lists the results in words, in C, because a child of fork cannot call Go.
func resultsC(b *bytes.Buffer) {
	b.WriteString("\nconst cuvmm_result cuvmm_results[] = {\n")
	const end = 1000 // behind the vendor's last
	for r := range driver.Result(end) {
		if name, ok := r.Name(); ok {
			words := strings.TrimPrefix(strings.TrimPrefix(name, "CUDA_"), "ERROR_")
			fmt.Fprintf(b, "    {%d, %q, %q},\n", r, name, strings.ToLower(strings.ReplaceAll(words, "_", " ")))
		}
	}
	b.WriteString("};\n\nconst size_t cuvmm_results_n = sizeof cuvmm_results / sizeof *cuvmm_results;\n")
}

// exportsGo are the Go functions behind the entry points.
func (t *table) exportsGo() []byte {
	var b bytes.Buffer
	b.WriteString(notice + built + "package main\n\n// #include \"libcuda.h\"\nimport \"C\"\n\n")
	b.WriteString("import (\n\"unsafe\"\n\n\"github.com/cuvmm/cuvmm/internal/driver\"\n)\n")
	for _, e := range t.entries {
		if !t.handExports[e.method] {
			e.exportGo(&b)
		}
	}
	return b.Bytes()
}

func (e *entry) exportGo(b *bytes.Buffer) {
	var params []string
	for _, c := range e.declared {
		params = append(params, c.name+" "+goOfC(c.typ))
	}
	fmt.Fprintf(b, "\n//export cuvmm_sim_%s\nfunc cuvmm_sim_%[1]s(%s) C.int32_t {\n", e.method, strings.Join(params, ", "))
	if bad := e.refused(); len(bad) > 0 {
		fmt.Fprintf(b, "if %s {\nreturn C.int32_t(driver.InvalidValue)\n}\n", strings.Join(bad, " || "))
	}
	var args []string
	for _, f := range e.params {
		if f.name == e.context {
			args = append(args, "0") // the thread's
			continue
		}
		args = append(args, e.argument(f))
	}
	call := fmt.Sprintf("lib.%s(%s)", e.method, strings.Join(args, ", "))
	b.WriteString("lib, res := opened()\nif res != driver.Success {\nreturn code(res)\n}\n")
	if len(e.results) == 0 {
		fmt.Fprintf(b, "return code(%s)\n}\n", call)
		return
	}
	var got []string
	for i := range e.results {
		got = append(got, fmt.Sprintf("v%d", i))
	}
	fmt.Fprintf(b, "%s, res := %s\nif res != driver.Success {\nreturn code(res)\n}\n", strings.Join(got, ", "), call)
	for i, f := range e.results {
		c, _ := findDeclared(e.declared, f.name)
		store := fmt.Sprintf("*%s = %s\n", f.name, toC(c, f, got[i]))
		if i > 0 { // the driver lets callers leave out the later ones
			store = fmt.Sprintf("if %s != nil {\n%s}\n", f.name, store)
		}
		b.WriteString(store)
	}
	b.WriteString("return 0\n}\n")
}

// refused are the conditions under which the driver refuses the arguments
// before it looks at anything else.
func (e *entry) refused() []string {
	var bad []string
	for _, c := range e.declared {
		lens := c.slices()
		_, in := find(e.params, c.name)
		switch {
		case len(lens) > 0:
			bad = append(bad, c.name+" > longest")
			for _, s := range lens {
				bad = append(bad, fmt.Sprintf("%s == nil && %s != 0", s, c.name))
			}
			if strings.HasPrefix(c.value, "bytes") {
				bad = append(bad, fmt.Sprintf("%s%%C.size_t(unsafe.Sizeof(*%s)) != 0", c.name, lens[0]))
			}
		case c.value == "NULL":
			bad = append(bad, c.name+" != nil")
		case c.value != "":
			bad = append(bad, fmt.Sprintf("%s != %s", c.name, c.value))
		case in:
			f, _ := find(e.params, c.name)
			if strings.HasPrefix(c.typ, "const cuvmm_") && !strings.HasPrefix(f.typ, "[]") {
				bad = append(bad, c.name+" == nil")
			}
		case c.name == e.results[0].name:
			bad = append(bad, c.name+" == nil")
		}
	}
	return bad
}

// argument is what the driver's method is given for its parameter.
func (e *entry) argument(f field) string {
	c, _ := findDeclared(e.declared, f.name)
	elem, slice := strings.CutPrefix(f.typ, "[]")
	switch {
	case slice:
		for _, n := range e.declared {
			for _, s := range n.slices() {
				if s == f.name && strings.HasPrefix(n.value, "bytes") {
					return fmt.Sprintf("unsafe.Slice((*%s)(unsafe.Pointer(%s)), %s/C.size_t(unsafe.Sizeof(*%[2]s)))", qualified(elem), f.name, n.name)
				} else if s == f.name {
					return fmt.Sprintf("unsafe.Slice((*%s)(unsafe.Pointer(%s)), %s)", qualified(elem), f.name, n.name)
				}
			}
		}
	case f.typ == "unsafe.Pointer":
		return f.name
	case strings.HasSuffix(c.typ, "*"):
		return fmt.Sprintf("*(*%s)(unsafe.Pointer(%s))", qualified(f.typ), f.name)
	case cStructs[f.typ] != "":
		return fmt.Sprintf("*(*%s)(unsafe.Pointer(&%s))", qualified(f.typ), f.name)
	}
	return fmt.Sprintf("%s(%s)", qualified(f.typ), f.name)
}

// toC is a result as the C parameter holds it.
func toC(c cParam, f field, value string) string {
	base, _ := strings.CutSuffix(c.typ, " *")
	switch {
	case f.typ == "unsafe.Pointer":
		return value
	case f.typ == "bool":
		return fmt.Sprintf("C.%s(truth(%s))", base, value)
	case cStructs[f.typ] != "":
		return fmt.Sprintf("*(*C.%s)(unsafe.Pointer(&%s))", base, value)
	}
	return fmt.Sprintf("C.%s(%s)", base, value)
}

// goOfC is a C type as cgo names it.
func goOfC(typ string) string {
	base := strings.TrimPrefix(typ, "const ")
	name := strings.TrimRight(base, " *")
	stars := strings.Count(base, "*")
	if name == "void" {
		return strings.Repeat("*", stars-1) + "unsafe.Pointer"
	}
	return strings.Repeat("*", stars) + "C." + name
}

func findDeclared(all []cParam, name string) (cParam, bool) {
	for _, c := range all {
		if c.name == name {
			return c, true
		}
	}
	return cParam{}, false
}
