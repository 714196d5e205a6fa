package repotest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// builders are the functions that give back what was built, by a core.Undo or by what is made
// of one, with the test in which a later step fails and the driver refuses that, too.
var builders = map[string]string{
	"internal/core Context.Destroy":      "TestEveryFailureLeavesNothing",
	"cuda destroyTemplate":               "TestEveryFailureLeavesNothing",
	"cuda unloading":                     "TestModuleOfTheCompilersWordsIsGivenBack",
	"internal/phys Handle.left":          "TestWhatABuilderCannotUndoIsGivenBackLater",
	"internal/vrange Range.Undo":         "TestWhatABuilderCannotUndoIsGivenBackLater", // its rows are the builders of vmm
	"internal/pages copied.end":          "TestEveryFailureOfEveryOperation",
	"internal/bulk worker.unstage":       "TestEveryFailureLeavesNothing",
	"internal/suspend Suspension.drop":   "TestEveryFailureOfEveryOperation",
	"vmm buffer.forkOnce":                "TestWhatABuilderCannotUndoIsGivenBackLater",
	"vmm importBuffer":                   "TestWhatABuilderCannotUndoIsGivenBackLater",
	"vmm buffer.discard":                 "TestWhatABuilderCannotUndoIsGivenBackLater",
	"vmm buffer.mapChunks":               "TestWhatABuilderCannotUndoIsGivenBackLater",
	"vmm buffer.prefixLocked":            "TestWhatABuilderCannotUndoIsGivenBackLater",
	"vmm buffer.createLocked":            "TestWhatABuilderCannotUndoIsGivenBackLater",
	"vmm Reservation.Map":                "TestWhatABuilderCannotUndoIsGivenBackLater",
	"vmm Reservation.MapRun":             "TestWhatABuilderCannotUndoIsGivenBackLater",
	"vmm makePages":                      "TestWhatABuilderCannotUndoIsGivenBackLater",
	"vmm newSparse":                      "TestWhatABuilderCannotUndoIsGivenBackLater",
	"vmm/pool Pool.lose":                 "TestWhatATrimLosesIsALeftover",
	"vmm/pool Pool.closeEmpty":           "TestCloseTakesLeftoversAlong",
	"handles/broker makeMemory":          "TestEveryFailure",
	"managed newBuffer":                  "TestFailuresWhileMakingAndClosing",
	"multicast Object.bind":              "TestEveryFailure",
	"multicast importAs":                 "TestEveryFailureOfATeam",
	"multicast Team.mapped":              "TestEveryFailureOfATeam",
	"multicast Team.newUndo":             "TestEveryFailureOfATeam",
	"internal/exchange Importer.Discard": "TestEveryFailureOfSharing",
	"handles conn.receive":               "TestReceivedMemoryWhoseSenderGoesIsGivenBack",
	"handles conn.accept":                "TestEveryFailureOfSharing",
	"handles receiveBuffer":              "TestMemoryThatNoArrayCanHaveIsGivenBack",
	"handles ImportArray":                "TestMemoryThatNoArrayCanHaveIsGivenBack",
	"handles importBuffer":               "TestEveryFailureOfShare",
	"handles importOffer":                "TestEveryFailureOfShare",
	"handles/publish Open":               "TestWhatAnOperationCannotUndoIsGivenBackLater",
	"handles/publish line.open":          "TestEveryFailureOfOpening",
	"handles/publish follower.abandon":   "TestEveryFailureOfFollowing",
	"handles/publish follower.carryOut":  "TestEveryFailureOfFollowing",
	"handles/publish pageSlot.drop":      "TestEveryFailureOfFollowing",
	"handles/publish dropStream":         "TestWhatAnOperationCannotUndoIsGivenBackLater",
	"fabric/rendezvous abandonAll":       "TestEveryFailureOfShare",
	"cmd/libcuvmm entry.makeSegment":     "TestSegmentThatFailsIsGivenBack",
	"cmd/libcuvmm entry.makeRange":       "TestRangeThatFailsIsGivenBack",
}

// undoes are the calls by which something is given back after a failure, with the least number
// of their arguments, by which they differ from others of these names.
var undoes = map[string]int{"NewUndo": 1, "Left": 5, "Abandon": 2, "Discard": 1}

// builds returns the functions of the library that give back what they built.
func builds(tr *tree) (all []string) {
	for _, g := range tr.gos {
		if g.test || strings.HasPrefix(g.dir, testCode) || strings.HasPrefix(g.dir, "cuda/sim") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), g.path, tr.read(g.path), parser.SkipObjectResolution)
		if err != nil {
			all = append(all, err.Error())
			continue
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Body != nil && undoesSomething(fn.Body) {
				all = append(all, g.dir+" "+nameOf(fn))
			}
		}
	}
	return all
}

func undoesSomething(body ast.Node) (found bool) {
	ast.Inspect(body, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok {
			if s, ok := call.Fun.(*ast.SelectorExpr); ok {
				least, known := undoes[s.Sel.Name]
				found = found || known && len(call.Args) >= least
			}
		}
		return true
	})
	return found
}

// nameOf returns Function, or Type.Method.
func nameOf(fn *ast.FuncDecl) string {
	if fn.Recv == nil {
		return fn.Name.Name
	}
	t := fn.Recv.List[0].Type
	if p, ok := t.(*ast.StarExpr); ok {
		t = p.X
	}
	if g, ok := t.(*ast.IndexExpr); ok {
		t = g.X
	}
	return fmt.Sprintf("%v.%s", t, fn.Name.Name)
}

func checkBuilders(tr *tree) []string { return checkBuildersOf(tr, builders) }

// checkBuildersOf compares the functions that undo with the table.
func checkBuildersOf(tr *tree, table map[string]string) (complaints []string) {
	there := builds(tr)
	for _, b := range there {
		if table[b] == "" {
			complaints = append(complaints, b+" gives back what it built: add a row to the table of builders, and to a test in which the driver refuses that")
		}
	}
	for _, b := range slices.Sorted(maps.Keys(table)) {
		if !slices.Contains(there, b) {
			complaints = append(complaints, b+" gives nothing back any more: remove its row from the table of builders")
		}
		if !slices.ContainsFunc(tr.gos, func(g goFile) bool { return g.test && strings.Contains(tr.read(g.path), "func "+table[b]+"(") }) {
			complaints = append(complaints, b+": there is no "+table[b])
		}
	}
	return complaints
}

func TestBuilders(t *testing.T) {
	tr := given(t,
		"vmm/a.go", "package vmm\n\nfunc (a *A[T]) make() error { return a.sys.NewUndo(a.d).After(nil) }\n",
		"vmm/b.go", "package vmm\n\nfunc b() error { return r.Left(1, 2) }\n",
		"vmm/b_test.go", "package vmm\n\nfunc TestB() { sys.NewUndo(d) }\n",
		"handles/c.go", "package handles\n\nfunc c() error { return share.Of(b).Abandon(op, err) }\n",
	)
	require.Empty(t, checkBuildersOf(tr, map[string]string{"vmm A.make": "TestB", "handles c": "TestB"}))
	wantComplaints(t, checkBuildersOf(tr, map[string]string{"handles c": "TestC", "vmm b": "TestB"}),
		"vmm A.make gives back what it built", "handles c: there is no TestC", "vmm b gives nothing back any more")
}
