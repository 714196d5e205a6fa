package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// entry is one row of the table: a method of the interface and the directive
// over it.
type entry struct {
	method   string // "MemCreate"
	name     string // "cuMemAlloc": the call's name, and the member of the C table
	symbol   string // "cuMemAlloc_v2": what the driver's library exports
	version  string // "10020"
	hand     bool   // the wrapper is written by hand
	bare     bool   // the call leaves the thread alone
	asking   bool   // likewise, unless it names a default stream
	foreign  bool   // only Foreign has the method
	context  string // the parameter that names the context to make current, or empty
	params   []field
	results  []field // without the Result
	declared []cParam
}

// field is a parameter or a result of a method.
type field struct{ name, typ string }

// cParam is a parameter of the entry point's C declaration: "const cuvmm_prop
// *" and "prop". value is empty where the method's parameter or result of the
// same name is passed.
type cParam struct{ typ, name, value string }

// table is what the sources of internal/driver say.
type table struct {
	entries []entry
	// kinds maps the package's named types to what they are made of: "Ptr" to
	// "uint64", "Location" to "struct".
	kinds map[string]string
	// handExports are the methods whose Go functions in cmd/libcuda are written
	// by hand.
	handExports map[string]bool
}

// readTable parses the Go files of a folder.
func readTable(dir string) (*table, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}
	t := &table{kinds: map[string]string{}}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		src, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		if err := t.read(name, src); err != nil {
			return nil, err
		}
	}
	return t, t.check()
}

func (t *table) read(name string, src []byte) error {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, src, parser.ParseComments)
	if err != nil {
		return err
	}
	for _, decl := range file.Decls {
		gen, ok := decl.(*ast.GenDecl)
		if !ok {
			continue
		}
		for _, spec := range gen.Specs {
			spec, ok := spec.(*ast.TypeSpec)
			if !ok {
				continue
			}
			switch typ := spec.Type.(type) {
			case *ast.Ident:
				t.kinds[spec.Name.Name] = typ.Name
			case *ast.StructType, *ast.ArrayType:
				t.kinds[spec.Name.Name] = "struct"
			case *ast.InterfaceType:
				for _, m := range typ.Methods.List {
					if err := t.readMethod(m, spec.Name.Name == "Foreign"); err != nil {
						return fmt.Errorf("%v: %w", fset.Position(m.Pos()), err)
					}
				}
			}
		}
	}
	return nil
}

func (t *table) readMethod(m *ast.Field, foreign bool) error {
	line := directive(m.Doc)
	if line == "" {
		return nil
	}
	e := entry{method: m.Names[0].Name, foreign: foreign}
	if err := e.parseDirective(line); err != nil {
		return err
	}
	typ := m.Type.(*ast.FuncType)
	e.params, e.results = fields(typ.Params), fields(typ.Results)
	last := len(e.results) - 1
	if last < 0 || e.results[last].typ != "Result" {
		return fmt.Errorf("the last result of %s is no Result", e.method)
	}
	e.results = e.results[:last]
	t.entries = append(t.entries, e)
	return nil
}

func directive(doc *ast.CommentGroup) string {
	if doc == nil {
		return ""
	}
	for _, c := range doc.List {
		if line, ok := strings.CutPrefix(c.Text, "//cu:"); ok {
			return line
		}
	}
	return ""
}

func fields(list *ast.FieldList) []field {
	var all []field
	for _, f := range list.List {
		typ := typeName(f.Type)
		if len(f.Names) == 0 {
			all = append(all, field{"", typ})
		}
		for _, n := range f.Names {
			all = append(all, field{n.Name, typ})
		}
	}
	return all
}

func typeName(x ast.Expr) string {
	switch x := x.(type) {
	case *ast.Ident:
		return x.Name
	case *ast.SelectorExpr:
		return typeName(x.X) + "." + x.Sel.Name
	case *ast.ArrayType:
		return "[]" + typeName(x.Elt)
	}
	return fmt.Sprintf("%T", x)
}

var (
	directiveForm = regexp.MustCompile(`^(entry|hand) (\d+) (bare |asking )?(cu[A-Z][A-Za-z0-9]*)(_v\d)?\((.*)\)$`)
	paramForm     = regexp.MustCompile(`^((?:const )?\w+ \**)(\w+)(?:=(.+))?$`)
)

func (e *entry) parseDirective(line string) error {
	m := directiveForm.FindStringSubmatch(line)
	if m == nil {
		return fmt.Errorf("%q is not of the form: entry|hand VERSION [bare|asking] cuName(C PARAMETERS)", line)
	}
	e.hand, e.version, e.bare, e.asking, e.name, e.symbol = m[1] == "hand", m[2], m[3] == "bare ", m[3] == "asking ", m[4], m[4]+m[5]
	if m[5] == "_v1" { // the older of two forms, whose symbol has no suffix
		e.name, e.symbol = e.symbol, e.name
	}
	for _, p := range splitParams(m[6]) {
		part := paramForm.FindStringSubmatch(p)
		if part == nil {
			return fmt.Errorf("%s: %q is no parameter: write its type, its name, and =VALUE where no parameter or result of the method is passed", e.name, p)
		}
		e.declared = append(e.declared, cParam{strings.TrimSpace(part[1]), part[2], part[3]})
	}
	return nil
}

// stream is the parameter that names a stream, or empty.
func (e *entry) stream() string {
	for _, p := range e.params {
		if p.typ == "Stream" {
			return p.name
		}
	}
	return ""
}

// splitParams splits at the commas outside of parentheses.
func splitParams(s string) []string {
	var parts []string
	depth, start := 0, 0
	for i, c := range s {
		switch c {
		case '(':
			depth++
		case ')':
			depth--
		case ',':
			if depth == 0 {
				parts = append(parts, strings.TrimSpace(s[start:i]))
				start = i + 1
			}
		}
	}
	if rest := strings.TrimSpace(s[start:]); rest != "" {
		parts = append(parts, rest)
	}
	return parts
}

// cStructs are the structs of csrc.h by their Go types.
var cStructs = map[string]string{
	"UUID": "cuvmm_uuid", "Location": "cuvmm_location", "AllocationProp": "cuvmm_prop",
	"AccessDesc": "cuvmm_access", "MulticastProp": "cuvmm_multicast", "LockArgs": "cuvmm_lock",
	"CopyAttributes": "cuvmm_copy",
}

// cScalars are the kinds of numbers that a C type holds without loss.
var cScalars = map[string][]string{
	"uint8_t": {"uint8"}, "int32_t": {"int32"}, "uint32_t": {"uint32"},
	"uint64_t": {"uint64"}, "size_t": {"uint64"}, "uintptr_t": {"uintptr"}, "float": {"float32"},
}

// reserved are the names that the generated functions use themselves.
var reserved = []string{"t", "got", "r", "drv", "ctx", "result", "table", "thread", "outcome", "lib", "res"}

// check sees that every row can be generated, so that a slip in a declaration
// ends here and not in a driver.
func (t *table) check() error {
	if len(t.entries) == 0 {
		return fmt.Errorf("no entry points: is this the folder of internal/driver?")
	}
	names := map[string]bool{}
	for i := range t.entries {
		e := &t.entries[i]
		if names[e.name] {
			return fmt.Errorf("%s stands twice", e.name)
		}
		names[e.name] = true
		if err := t.checkEntry(e); err != nil {
			return fmt.Errorf("%s: %w", e.method, err)
		}
	}
	return nil
}

func (t *table) checkEntry(e *entry) error {
	passed := map[string]bool{}
	for _, c := range e.declared {
		passed[c.name] = true
	}
	if len(e.params) > 0 && e.params[0].typ == "Context" && !passed[e.params[0].name] {
		e.context = e.params[0].name
	}
	if e.hand {
		return nil
	}
	if e.bare && e.context != "" {
		return fmt.Errorf("a bare call takes no context")
	}
	if e.asking && (e.context == "" || e.stream() == "") {
		return fmt.Errorf("an asking call takes a context, and a stream")
	}
	for _, f := range slices.Concat(e.params, e.results) {
		switch {
		case slices.Contains(reserved, f.name):
			return fmt.Errorf("the generated functions use the name %q themselves: choose another", f.name)
		case f.name != e.context && !passed[f.name]:
			return fmt.Errorf("%q is not among the parameters of %s", f.name, e.name)
		}
	}
	if len(e.results) > 2 {
		return fmt.Errorf("more than two results: write it by hand")
	}
	for _, c := range e.declared {
		if err := t.checkParam(e, c); err != nil {
			return err
		}
	}
	return nil
}

func (t *table) checkParam(e *entry, c cParam) error {
	if c.value != "" {
		lens := c.slices()
		for _, name := range lens {
			if f, ok := find(e.params, name); !ok || !strings.HasPrefix(f.typ, "[]") {
				return fmt.Errorf("%s=%s: %q is no slice among the parameters", c.name, c.value, name)
			}
		}
		if len(lens) > 1 && len(e.results) > 0 {
			return fmt.Errorf("%s=%s: slices of one length in a method with results: write it by hand", c.name, c.value)
		}
		return nil
	}
	if f, ok := find(e.results, c.name); ok {
		return t.checkResult(e, c, f)
	}
	f, ok := find(e.params, c.name)
	if !ok {
		return fmt.Errorf("%s is neither a parameter nor a result: give it a value with =", c.name)
	}
	base, pointer := strings.CutSuffix(strings.TrimPrefix(c.typ, "const "), " *")
	elem, slice := strings.CutPrefix(f.typ, "[]")
	switch {
	case f.typ == "unsafe.Pointer" && base == "void" && pointer:
	case (slice || f.typ == elem) && cStructs[elem] == base && pointer == (slice || strings.HasPrefix(c.typ, "const ")):
	case slice == pointer && slices.Contains(cScalars[base], t.kind(elem)):
	default:
		return fmt.Errorf("%s is a %s in Go and a %q in C", c.name, f.typ, c.typ)
	}
	return nil
}

func (t *table) checkResult(e *entry, c cParam, f field) error {
	base, pointer := strings.CutSuffix(c.typ, " *")
	_, number := cScalars[base]
	integer := number && base != "float"
	switch kind := t.kind(f.typ); {
	case f.typ == "unsafe.Pointer" && c.typ == "void **" && len(e.results) == 1:
	case !pointer:
		return fmt.Errorf("the result %s is a %q in C: it must be a pointer", c.name, c.typ)
	case kind == "struct" && cStructs[f.typ] == base && len(e.results) == 1:
	case kind == "float32" && base == "float" && len(e.results) == 1:
	case integer && (kind == "bool" || kind != "float32" && kind != "struct"):
	default:
		return fmt.Errorf("the result %s is a %s in Go and a %q in C", c.name, f.typ, c.typ)
	}
	return nil
}

// kind is what a Go type is made of.
func (t *table) kind(typ string) string {
	if k, ok := t.kinds[typ]; ok {
		return k
	}
	return typ
}

var sizeForm = regexp.MustCompile(`^(len|bytes)\((\w+(?:,\w+)*)\)$`)

// slices are the parameters whose length the value is.
func (c cParam) slices() []string {
	if m := sizeForm.FindStringSubmatch(c.value); m != nil {
		return strings.Split(m[2], ",")
	}
	return nil
}

func find(all []field, name string) (field, bool) {
	i := slices.IndexFunc(all, func(f field) bool { return f.name == name })
	if i < 0 {
		return field{}, false
	}
	return all[i], true
}
