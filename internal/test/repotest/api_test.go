package repotest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/build"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

//go:generate go test -run ^TestAPIListing$ -update .

var update = flag.Bool("update", false, "write the listings of the public API")

// listedModules are the folders of the other modules that programs import, and the
// package of each. What they require may not be on this machine, unlike in CI.
var listedModules = map[string]string{
	"fabric/rendezvous/etcd": modulePath + "/fabric/rendezvous/etcd",
	"metrics":                modulePath + "/metrics",
}

// listings is the folder of the listings of the public API, one file a package.
const listings = "docs/api"

// TestAPIListing compares what every public package exports with its listing, so that
// each change of the public API is seen in a diff.
func TestAPIListing(t *testing.T) {
	if !build.Default.CgoEnabled || runtime.GOOS != "linux" {
		t.Skip("the listings are of builds for linux with cgo, and csrc is another package elsewhere")
	}
	root := repositoryRoot(t)
	packages, err := publicPackages(root)
	require.NoError(t, err)
	require.Contains(t, packages, modulePath+"/cuda")
	for folder, want := range listedModules {
		of, err := publicPackages(filepath.Join(root, filepath.FromSlash(folder)))
		if err != nil && os.Getenv("CI") == "" && !*update {
			t.Logf("%s is not compared, because its requirements are not here: %v", folder, err)
			packages[want] = nil
			continue
		}
		require.NoError(t, err)
		require.Contains(t, of, want)
		maps.Copy(packages, of)
	}
	have, err := filepath.Glob(filepath.Join(root, listings, "*.txt"))
	require.NoError(t, err)
	for path, pkg := range packages {
		file := filepath.Join(root, listings, strings.ReplaceAll(strings.TrimPrefix(path, modulePath+"/"), "/", "-")+".txt")
		have = slices.DeleteFunc(have, func(name string) bool { return name == file })
		if pkg == nil {
			continue
		}
		want := strings.Join(surfaceLines(pkg), "\n") + "\n"
		if *update {
			require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
			require.NoError(t, os.WriteFile(file, []byte(want), 0o644))
			continue
		}
		is, err := os.ReadFile(file)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		if diff := lineDiff(string(is), want); diff != "" {
			t.Errorf("the public API of %s has changed:\n%sif that is intended, run go generate ./internal/test/repotest and commit %s", path, diff, listings)
		}
	}
	for _, file := range have {
		if *update {
			require.NoError(t, os.Remove(file))
			continue
		}
		t.Errorf("%s lists no public package: run go generate ./internal/test/repotest", file)
	}
}

// A listing has every kind of symbol, and nothing that is not exported.
func TestSurfaceLines(t *testing.T) {
	const source = `package p
		import "io"
		const Limit = 1 << 40
		const hidden = 1
		type Mode uint8
		const On Mode = 1
		var ErrX, errX error
		type hold struct{}
		func (hold) Held() int { return 0 }
		type Box[T any] struct { hold; Size int; w io.Writer }
		func (b *Box[T]) Put(v T, more ...T) (n int, err error) { return }
		func (b Box[T]) Len() int { return 0 }
		func (b Box[T]) len() int { return 0 }
		type Closer interface { Close() error }
		type sealed interface { Closer; seal() }
		type Sealed interface { Closer; seal() }
		type Number interface { ~int | ~float64 }
		func Sum[T Number](all []T, w io.Writer) T { panic(0) }
		type Same = Mode
	`
	set := token.NewFileSet()
	f, err := parser.ParseFile(set, "p.go", source, 0)
	require.NoError(t, err)
	config := types.Config{Importer: importer.ForCompiler(set, "source", nil)}
	pkg, err := config.Check("example.com/p", set, []*ast.File{f}, nil)
	require.NoError(t, err)
	require.Equal(t, []string{
		"const Limit untyped int = 1099511627776",
		"const On Mode = 1",
		"func Sum[T Number](all []T, w io.Writer) T",
		"method (*Box[T]) Put(v T, more ...T) (n int, err error)",
		"method (Box[T]) Held() int",
		"method (Box[T]) Len() int",
		"type Box[T any] struct",
		"type Box[T any] struct, Size int",
		"type Closer interface",
		"type Closer interface, Close() error",
		"type Mode uint8",
		"type Number interface{~int | ~float64}",
		"type Same = Mode",
		"type Sealed interface with unexported methods",
		"type Sealed interface, Close() error",
		"var ErrX error",
	}, surfaceLines(pkg))
	require.Equal(t, "\t- b\n\t+ c\n", lineDiff("a\nb\n", "a\nc\n"))
	require.Empty(t, lineDiff("a\nb\n", "a\nb\n"))
	require.NotEmpty(t, lineDiff("b\na\n", "a\nb\n"))
}

// publicPackages type-checks the packages of a module that other modules can import, by
// the export data of the go command.
func publicPackages(root string) (map[string]*types.Package, error) {
	cmd := exec.Command("go", "list", "-export", "-deps", "-json=ImportPath,Name,Export,Standard,Module", "./...")
	cmd.Dir = root
	var problems bytes.Buffer
	cmd.Stderr = &problems
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w: %s", err, problems.String())
	}
	type listed struct {
		ImportPath, Name, Export string
		Module                   *struct{ Main bool }
	}
	exports := map[string]string{}
	var public []string
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		exports[p.ImportPath] = p.Export
		internal := slices.Contains(strings.Split(p.ImportPath, "/"), "internal")
		if p.Module != nil && p.Module.Main && p.Name != "main" && !internal && p.ImportPath != modulePath {
			public = append(public, p.ImportPath)
		}
	}
	from := importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(exports[path])
	})
	packages := map[string]*types.Package{}
	for _, path := range public {
		if packages[path], err = from.Import(path); err != nil {
			return nil, err
		}
	}
	return packages, nil
}

// surfaceLines lists what a package exports, one symbol a line: constants with their
// values, variables, functions, types with their exported fields and methods.
func surfaceLines(pkg *types.Package) []string {
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	qualifier := types.RelativeTo(pkg)
	short := func(p *types.Package) string {
		if qualifier(p) == "" {
			return ""
		}
		return p.Name()
	}
	write := func(t types.Type) string { return types.TypeString(t, short) }
	scope := pkg.Scope()
	for _, name := range scope.Names() {
		o := scope.Lookup(name)
		if !o.Exported() {
			continue
		}
		switch o := o.(type) {
		case *types.Const:
			add("const %s %s = %s", name, write(o.Type()), o.Val().ExactString())
		case *types.Var:
			add("var %s %s", name, write(o.Type()))
		case *types.Func:
			add("func %s%s", name, strings.TrimPrefix(write(o.Signature()), "func"))
		case *types.TypeName:
			lines = append(lines, typeLines(o, write, short)...)
		}
	}
	slices.Sort(lines)
	return lines
}

// typeLines lists a type: what it is, its exported fields, and its exported methods,
// embedded ones included.
func typeLines(o *types.TypeName, write func(types.Type) string, short types.Qualifier) []string {
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	if o.IsAlias() {
		add("type %s = %s", o.Name(), write(types.Unalias(o.Type())))
		return lines
	}
	named := o.Type().(*types.Named)
	name := o.Name() + typeParameters(named, write)
	switch u := named.Underlying().(type) {
	case *types.Struct:
		add("type %s struct", name)
		for f := range u.Fields() {
			if f.Exported() {
				add("type %s struct, %s %s", name, f.Name(), write(f.Type()))
			}
		}
	case *types.Interface:
		sealed := ""
		for m := range u.Methods() {
			if !m.Exported() {
				sealed = " with unexported methods"
			}
		}
		if !u.IsMethodSet() {
			add("type %s %s", name, write(u))
			return lines
		}
		add("type %s interface%s", name, sealed)
		for m := range u.Methods() {
			if m.Exported() {
				add("type %s interface, %s%s", name, m.Name(), strings.TrimPrefix(write(m.Type()), "func"))
			}
		}
		return lines
	default:
		add("type %s %s", name, write(u))
	}
	values, pointers := types.NewMethodSet(named), types.NewMethodSet(types.NewPointer(named))
	for selection := range pointers.Methods() {
		m := selection.Obj().(*types.Func)
		if !m.Exported() {
			continue
		}
		receiver := "*" + o.Name()
		if values.Lookup(m.Pkg(), m.Name()) != nil {
			receiver = o.Name()
		}
		add("method (%s) %s%s", receiver+typeArguments(named), m.Name(), strings.TrimPrefix(write(m.Signature()), "func"))
	}
	return lines
}

// typeParameters writes the parameters of a generic type with their constraints.
func typeParameters(named *types.Named, write func(types.Type) string) string {
	var all []string
	for p := range named.TypeParams().TypeParams() {
		all = append(all, p.Obj().Name()+" "+write(p.Constraint()))
	}
	if len(all) == 0 {
		return ""
	}
	return "[" + strings.Join(all, ", ") + "]"
}

// typeArguments writes the parameters of a generic type as its methods name them.
func typeArguments(named *types.Named) string {
	var all []string
	for p := range named.TypeParams().TypeParams() {
		all = append(all, p.Obj().Name())
	}
	if len(all) == 0 {
		return ""
	}
	return "[" + strings.Join(all, ", ") + "]"
}

// lineDiff lists the lines that only one of two sorted texts has.
func lineDiff(is, want string) string {
	lines := func(text string) (all []string) {
		for s := bufio.NewScanner(strings.NewReader(text)); s.Scan(); {
			all = append(all, s.Text())
		}
		return all
	}
	old, current := lines(is), lines(want)
	var b strings.Builder
	for _, l := range old {
		if !slices.Contains(current, l) {
			fmt.Fprintf(&b, "\t- %s\n", l)
		}
	}
	for _, l := range current {
		if !slices.Contains(old, l) {
			fmt.Fprintf(&b, "\t+ %s\n", l)
		}
	}
	if b.Len() == 0 && is != want {
		return "\tthe order of the lines\n"
	}
	return b.String()
}
