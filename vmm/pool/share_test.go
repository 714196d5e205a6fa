package pool

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
)

// A chunk holds data of many owners: it is never exported.
func TestChunksAreNotExported(t *testing.T) {
	_, sys := sim.Open(t)
	p, err := New(sys.Devices()[0], Options{})
	require.NoError(t, err)
	h, err := p.newChunk(32 << 20)
	require.NoError(t, err)
	_, err = h.Export("test")
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
	require.ErrorContains(t, err, "earlier owner")
	require.NoError(t, p.drop(allocOp, h))
	require.NoError(t, p.Close())
}

// Package handles shares vmm's owners of memory, and nothing public of this package
// returns one.
func TestNothingPublicReturnsAnOwnerOfMemory(t *testing.T) {
	names, err := filepath.Glob("*.go")
	require.NoError(t, err)
	if len(names) == 0 {
		needs.Lacks(t, "the package's sources")
	}
	seen := 0
	check := func(where string, n ast.Node) {
		ast.Inspect(n, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok {
				if x, ok := s.X.(*ast.Ident); ok && x.Name == "vmm" {
					require.NotContains(t, []string{"Allocation", "Buffer", "Array", "Slice", "Mapping", "Reservation"}, s.Sel.Name, where)
				}
			}
			return true
		})
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		require.NoError(t, err)
		for _, d := range f.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Name.IsExported() && d.Type.Results != nil {
					seen++
					check(d.Name.Name, d.Type.Results)
				}
			case *ast.GenDecl:
				for _, s := range d.Specs {
					of, ok := s.(*ast.TypeSpec)
					if !ok || !of.Name.IsExported() {
						continue
					}
					st, ok := of.Type.(*ast.StructType)
					if !ok {
						check(of.Name.Name, of.Type)
						continue
					}
					for _, field := range st.Fields.List {
						public := len(field.Names) == 0
						for _, n := range field.Names {
							public = public || n.IsExported()
						}
						if public {
							check(of.Name.Name, field.Type)
						}
					}
				}
			}
		}
	}
	require.Greater(t, seen, 20)
}
