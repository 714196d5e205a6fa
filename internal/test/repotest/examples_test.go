package repotest

import (
	"fmt"
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// exemplary are the packages whose types and constructors all have examples. The
// other packages that programs use join the list when theirs have.
var exemplary = []string{"cuda", "cuda/auto", "vmm", "managed", "fabric", "fabric/rendezvous", "handles", "handles/peer", "handles/broker", "handles/publish", "load", "vmm/pool", "multicast", "inspect", "inspect/serve"}

// surface is what examples of a package must cover, and what they do.
type surface struct {
	names   []string
	covered map[string]bool
}

// surfaceOf reads a package: its exported types, and its exported functions that
// return one. An example that the tests run covers the name that it has, with or
// without a method's, and the names of the package that its body mentions; a
// function covers the types that it returns, and a constant its type.
func surfaceOf(dir string) (surface, error) {
	s := surface{covered: map[string]bool{}}
	paths, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return s, err
	}
	set := token.NewFileSet()
	var tests []*ast.File
	types, means := map[string]bool{}, map[string][]string{}
	var functions []*ast.FuncDecl
	for _, path := range paths {
		f, err := parser.ParseFile(set, path, nil, parser.ParseComments)
		if err != nil {
			return s, err
		}
		if strings.HasSuffix(path, "_test.go") {
			tests = append(tests, f)
			continue
		}
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.GenDecl:
				constant := "" // the type of the constants so far
				for _, spec := range d.Specs {
					switch spec := spec.(type) {
					case *ast.TypeSpec:
						if spec.Name.IsExported() {
							types[spec.Name.Name] = true
						}
					case *ast.ValueSpec:
						if spec.Type != nil || len(spec.Values) > 0 {
							constant = typeName(spec.Type)
						}
						for _, name := range spec.Names {
							means[name.Name] = append(means[name.Name], constant)
						}
					}
				}
			case *ast.FuncDecl:
				if d.Recv == nil && d.Name.IsExported() {
					functions = append(functions, d)
				}
			}
		}
	}
	for name := range types {
		s.names = append(s.names, name)
	}
	for _, f := range functions {
		if f.Type.Results == nil {
			continue
		}
		for _, r := range f.Type.Results.List {
			if name := typeName(r.Type); types[name] {
				means[f.Name.Name] = append(means[f.Name.Name], name)
			}
		}
		if len(means[f.Name.Name]) > 0 {
			s.names = append(s.names, f.Name.Name)
		}
	}
	slices.Sort(s.names)
	for _, e := range doc.Examples(tests...) {
		if e.Output == "" && !e.EmptyOutput {
			continue // it is not run
		}
		cover := func(name string) {
			s.covered[name] = true
			for _, other := range means[name] {
				s.covered[other] = true
			}
		}
		name, _, _ := strings.Cut(e.Name, "_")
		cover(name)
		ast.Inspect(e.Code, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok {
				if x, ok := sel.X.(*ast.Ident); ok && x.Name == filepath.Base(dir) {
					cover(sel.Sel.Name)
				}
			}
			return true
		})
	}
	return s, nil
}

// typeName is the name of a type of the same package, pointers and type arguments
// left out.
func typeName(t ast.Expr) string {
	switch t := t.(type) {
	case *ast.Ident:
		return t.Name
	case *ast.StarExpr:
		return typeName(t.X)
	case *ast.IndexExpr:
		return typeName(t.X)
	case *ast.IndexListExpr:
		return typeName(t.X)
	}
	return ""
}

// checkExamples returns the names of a package's surface that no example covers.
func checkExamples(pkg string, s surface) (complaints []string) {
	for _, name := range s.names {
		if !s.covered[name] {
			complaints = append(complaints, pkg+"."+name+" has no example: write one named after it, or use it in one, with // Output:")
		}
	}
	return complaints
}

func TestExamplesCoverTypesAndConstructors(t *testing.T) {
	for _, pkg := range exemplary {
		s, err := surfaceOf(filepath.Join("..", "..", "..", filepath.FromSlash(pkg)))
		if err != nil {
			t.Fatal(err)
		}
		if len(s.names) == 0 {
			t.Errorf("%s has no exported types: is the folder right?", pkg)
		}
		for _, c := range checkExamples(pkg, s) {
			t.Error(c)
		}
	}
}

func TestExamplesAreMissed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "p")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"p.go": `package p
type Named struct{}
type Method struct{}
type Mentioned[T any] struct{}
type NotRun int
type Absent struct{}
type Made struct{}
type Kind int
const (
	First Kind = iota
	Second
)
type hidden struct{}
func NewMade() (*Made, error) { return nil, nil }
func New() (*Named, error) { return nil, nil }
func Make[T any]() *Mentioned[T] { return nil }
func Size() int { return 0 }
func Hidden() hidden { return hidden{} }
func (Named) Other() Absent { return Absent{} }
`,
		"p_test.go": `package p_test
func ExampleNamed() {
	var m p.Mentioned[int]
	p.NewMade()
	_ = p.Second
	// Output:
}
func ExampleMethod_Do() {
	// Output: x
}
func ExampleNotRun() {
	var a p.Absent
}
`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s, err := surfaceOf(dir)
	if err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprint(checkExamples("p", s))
	for _, want := range []string{"p.Absent has no example", "p.NotRun has no example", "p.Make has no example", "p.New has no example"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missed: %s", want, got)
		}
	}
	for _, never := range []string{"p.Method ", "p.Mentioned ", "p.Made", "p.Kind", "p.NewMade", "p.Size", "p.Hidden", "p.Named", "p.hidden"} {
		if strings.Contains(got, never) {
			t.Errorf("%q is complained about: %s", never, got)
		}
	}
}
