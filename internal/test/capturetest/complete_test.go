package capturetest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
)

// apart are packages whose functions are no operations on the driver: csrc and
// cuda/sim lie below them, fabric/rendezvous moves bytes between processes and
// shares memory by handles alone, kernels' texts and traces are data, and what shows
// snapshots takes them by inspect.Take alone.
var apart = []string{"csrc", "csrc/kernels", "cuda/sim", "fabric/rendezvous", "inspect/page", "inspect/profile", "inspect/serve", "inspect/torch", "vmm/pool/trace"}

// Every operation has a case, and every case an operation. A folder of test
// binaries without the sources cannot tell.
func TestEveryOperationHasACase(t *testing.T) {
	found := sources(t)
	require.Greater(t, len(found["cuda"]), 60)
	require.Greater(t, len(found["vmm"]), 60)
	folders := maps.Clone(found)
	for folder := range tables {
		folders[folder] = found[folder]
	}
	for folder, names := range folders {
		if len(names) > 0 && tables[folder] == nil {
			t.Errorf("package %s has no table of cases: add a file to internal/test/capturetest, and its table to tables", folder)
			continue
		}
		for name := range tables[folder] {
			if names[name] == nil {
				t.Errorf("%s.%s is gone: remove its case from internal/test/capturetest", folder, name)
			}
		}
		for name := range names {
			if tables[folder][name] == nil {
				t.Errorf("%s.%s has no case: say in internal/test/capturetest how it is called while a stream captures", folder, name)
			}
		}
	}
}

// sources are the operations of this repository.
func sources(t *testing.T) map[string]map[string]*ast.FuncType {
	const root = "../../.."
	if _, err := os.Stat(root + "/go.mod"); err != nil {
		t.Skip("the sources are not here")
	}
	found, err := operations(os.DirFS(root))
	require.NoError(t, err)
	return found
}

// operations are the exported functions and methods of the packages that
// programs import, by folder and name. Those of embedded types are their owners'
// too.
func operations(root fs.FS) (map[string]map[string]*ast.FuncType, error) {
	found := map[string]map[string]*ast.FuncType{}
	err := fs.WalkDir(root, ".", func(name string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() || name == "." {
			return err
		}
		base := path.Base(name)
		_, module := fs.Stat(root, name+"/go.mod")
		if module == nil || base == "internal" || base == "testdata" || base == "samples" ||
			strings.HasPrefix(base, ".") || strings.HasPrefix(base, "_") {
			return fs.SkipDir
		}
		if !slices.Contains(apart, name) {
			names, err := exported(root, name)
			if err != nil {
				return err
			}
			if len(names) > 0 {
				found[name] = names
			}
		}
		return nil
	})
	return found, err
}

// exported are a package's functions, and methods with their types.
func exported(root fs.FS, folder string) (map[string]*ast.FuncType, error) {
	files, err := fs.Glob(root, folder+"/*.go")
	if err != nil {
		return nil, err
	}
	names := map[string]*ast.FuncType{}
	methods, embeds := map[string][]*ast.FuncDecl{}, map[string][]string{}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		src, err := fs.ReadFile(root, name)
		if err != nil {
			return nil, err
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, src, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		if f.Name.Name == "main" {
			return nil, nil
		}
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				switch {
				case !d.Name.IsExported():
				case d.Recv == nil:
					names[d.Name.Name] = d.Type
				default:
					on := typeName(d.Recv.List[0].Type)
					methods[on] = append(methods[on], d)
				}
			case *ast.GenDecl:
				for _, s := range d.Specs {
					t, ok := s.(*ast.TypeSpec)
					if !ok {
						continue
					}
					embeds[t.Name.Name] = append(embeds[t.Name.Name], embedded(t.Type)...)
				}
			}
		}
	}
	for owner := range embeds {
		if !ast.IsExported(owner) {
			continue
		}
		var collect func(of string)
		collect = func(of string) {
			for _, m := range methods[of] {
				names[owner+"."+m.Name.Name] = m.Type
			}
			for _, e := range embeds[of] {
				collect(e)
			}
		}
		collect(owner)
	}
	return names, nil
}

// embedded are the types of the same package in a struct.
func embedded(e ast.Expr) (names []string) {
	s, ok := e.(*ast.StructType)
	if !ok {
		return nil
	}
	for _, f := range s.Fields.List {
		if len(f.Names) == 0 {
			names = append(names, typeName(f.Type))
		}
	}
	return names
}

// typeName is the name of a type of the same package, without its pointer and
// its parameters.
func typeName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.StarExpr:
		return typeName(e.X)
	case *ast.IndexExpr:
		return typeName(e.X)
	case *ast.IndexListExpr:
		return typeName(e.X)
	}
	return ""
}

func TestOperationsAreFoundInSources(t *testing.T) {
	src := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	found, err := operations(fstest.MapFS{
		"room/a.go": src(`package room
			type Thing struct{ inner }
			type inner struct{ *deeper[int] }
			type deeper[T any] struct{}
			type lone struct{}
			func Make() {}
			func make2() {}
			func (t *Thing) Do() {}
			func (t Thing) hide() {}
			func (inner) Promoted() {}
			func (*deeper[T]) Deep() {}
			func (lone) Unseen() {}`),
		"room/b.go":            src("package room\ntype Pair[A, B any] struct{}\nfunc (p Pair[A, B]) Swap() {}"),
		"room/a_test.go":       src("package room\nfunc Helper() {}"),
		"room/internal/x/x.go": src("package x\nfunc X() {}"),
		"room/testdata/y.go":   src("package y\nfunc Y() {}"),
		"room/deep/z.go":       src("package deep\nfunc Z() {}"),
		"room/none/n.go":       src("package none"),
		"samples/1/main.go":    src("package one\nfunc One() {}"),
		"command/main.go":      src("package main\nfunc Run() {}"),
		"nested/go.mod":        src("module nested"),
		"nested/nested.go":     src("package nested\nfunc N() {}"),
		"csrc/csrc.go":         src("package csrc\nfunc Open() {}"),
		"cuda/sim/sim.go":      src("package sim\nfunc Open() {}"),
		"internal/driver/d.go": src("package driver\nfunc D() {}"),
	})
	require.NoError(t, err)
	names := map[string][]string{}
	for folder := range found {
		names[folder] = slices.Sorted(maps.Keys(found[folder]))
	}
	require.Equal(t, map[string][]string{
		"room":      {"Make", "Pair.Swap", "Thing.Deep", "Thing.Do", "Thing.Promoted"},
		"room/deep": {"Z"},
	}, names)
}
