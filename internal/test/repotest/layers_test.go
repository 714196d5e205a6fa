package repotest

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

// rooms is the order of the library, the lowest first: a room may import the
// rooms of the lines above it here, never its neighbours on the line nor what
// stands further down. A folder belongs to the longest room that it lies in.
var rooms = [][]string{
	{"internal/driver"},
	{"csrc"},
	{"cuda"},
	{"cuda/sim"},
	{"cuda/auto"},
	{"vmm"},
	{"handles/peer"},
	{"handles", "managed", "vmm/pool"},
	{"handles/publish", "load"},
	{"handles/broker"},
	{"inspect"},
	{"fabric"},
	{"multicast"},
	{"fabric/rendezvous/etcd", "metrics"}, // modules of their own, which no package imports
	{"cmd", "samples", "python", "."},
}

// chosenByUsers are the rooms through which a program picks its driver. No
// other room may: it would link the software driver into everybody's program.
var chosenByUsers = []string{"cuda/sim", "cuda/auto"}

// roomOf returns the room of a folder and its height. Packages in internal/ belong to
// their importers, and have none.
func roomOf(dir string) (room string, height int, ok bool) {
	for h, line := range rooms {
		for _, r := range line {
			if (dir == r || strings.HasPrefix(dir, r+"/")) && len(r) > len(room) {
				room, height, ok = r, h, true
			}
		}
	}
	return room, height, ok
}

// checkLayers: imports run down, even through internal/.
func checkLayers(tr *tree) []string {
	var complaints []string
	complain := func(at, format string, args ...any) {
		complaints = append(complaints, at+": "+fmt.Sprintf(format, args...))
	}
	shared := sharedImports(tr)
	for _, g := range tr.gos {
		room, height, ok := roomOf(g.dir)
		if !ok {
			if !strings.HasPrefix(g.dir, "internal/") && !strings.HasPrefix(g.dir, "tools") {
				complain(g.path, "the folder %s is in no room: give it its place in rooms (internal/test/repotest/layers_test.go) and in ARCHITECTURE.md", g.dir)
			}
			continue
		}
		for _, imp := range g.imports {
			dir, ok := imp.inModule()
			if !ok {
				continue
			}
			reached := map[string][]string{dir: {dir}}
			if _, _, isRoom := roomOf(dir); !isRoom && !g.test {
				reached = shared.from(dir)
			}
			for _, to := range slices.Sorted(maps.Keys(reached)) {
				target, targetHeight, ok := roomOf(to)
				if !ok || target == room {
					continue
				}
				via := ""
				if len(reached[to]) > 1 {
					via = " (through " + strings.Join(reached[to][:len(reached[to])-1], ", ") + ")"
				}
				chosen := slices.Contains(chosenByUsers, target)
				switch {
				case g.test && chosen:
				case targetHeight >= height:
					complain(imp.at, "%s imports %s%s, but imports run down only: %s. Move what both need into the lower room or into internal/", room, to, via, order())
				case chosen && room != "cuda/auto" && room != "cmd" && room != "samples" && room != "python" && room != ".":
					complain(imp.at, "%s imports %s%s: only programs, tests and cuda/auto choose a driver; take a *cuda.System from the caller", room, to, via)
				}
			}
		}
	}
	return complaints
}

func order() string {
	var lines []string
	for _, line := range rooms {
		lines = append(lines, strings.Join(line, ", "))
	}
	return strings.TrimSuffix(strings.Join(lines, " < "), ", .")
}

// imports is the graph of the folders below internal/ that are no room.
type imports map[string]map[string]bool

func sharedImports(tr *tree) imports {
	graph := imports{}
	for _, g := range tr.gos {
		if _, _, isRoom := roomOf(g.dir); isRoom || g.test {
			continue
		}
		for _, imp := range g.imports {
			if dir, ok := imp.inModule(); ok {
				if graph[g.dir] == nil {
					graph[g.dir] = map[string]bool{}
				}
				graph[g.dir][dir] = true
			}
		}
	}
	return graph
}

// from returns every folder that dir reaches, and the way there.
func (im imports) from(dir string) map[string][]string {
	ways := map[string][]string{dir: {dir}}
	for todo := []string{dir}; len(todo) > 0; todo = todo[1:] {
		for _, next := range slices.Sorted(maps.Keys(im[todo[0]])) {
			if ways[next] == nil {
				ways[next] = append(slices.Clone(ways[todo[0]]), next)
				todo = append(todo, next)
			}
		}
	}
	return ways
}

// checkSystemCalls keeps x/sys behind internal/, where what differs between
// operating systems is told apart once.
func checkSystemCalls(tr *tree) []string {
	var complaints []string
	for _, g := range tr.gos {
		if g.test || strings.HasPrefix(g.dir, "internal/") {
			continue
		}
		for _, imp := range g.imports {
			if strings.HasPrefix(imp.path, "golang.org/x/sys") {
				complaints = append(complaints, fmt.Sprintf("%s: %s outside internal/: call it from a package of internal/ and import that", imp.at, imp.path))
			}
		}
	}
	return complaints
}

// testCode is the folder of packages that tests alone import.
const testCode = "internal/test/"

// checkTestLibraries keeps testing code out of the programs of users: outside of
// internal/test only tests import it.
func checkTestLibraries(tr *tree) []string {
	var complaints []string
	for _, g := range tr.gos {
		if g.test || strings.HasPrefix(g.dir, testCode) {
			continue
		}
		for _, imp := range g.imports {
			dir, _ := imp.inModule()
			if isTestLibrary(imp.path) || strings.HasPrefix(dir, testCode) {
				complaints = append(complaints, fmt.Sprintf("%s: %s would be linked into users' programs: take a small interface instead, or move the code into a test or into %s", imp.at, imp.path, testCode))
			}
		}
	}
	return complaints
}

func isTestLibrary(p string) bool {
	for _, lib := range []string{"testing", "github.com/stretchr/testify", "pgregory.net/rapid", "go.uber.org/goleak"} {
		if p == lib || strings.HasPrefix(p, lib+"/") {
			return true
		}
	}
	return false
}

func TestLayers(t *testing.T) {
	imp := func(pkg, to string) string {
		return "package " + pkg + "\n\nimport _ \"" + modulePath + "/" + to + "\"\n"
	}
	for _, c := range []struct {
		name  string
		files []string
		want  []string
	}{
		{"down", []string{"vmm/a.go", imp("vmm", "cuda"), "vmm/pool/a.go", imp("pool", "vmm"), "fabric/a.go", imp("fabric", "handles/wire")}, nil},
		{"up", []string{"vmm/a.go", imp("vmm", "handles")}, []string{"vmm/a.go:3: vmm imports handles, but imports run down only: internal/driver < csrc"}},
		{"up into a room inside", []string{"vmm/a.go", imp("vmm", "vmm/pool")}, []string{"vmm imports vmm/pool"}},
		{"sideways", []string{"managed/a.go", imp("managed", "handles")}, []string{"managed imports handles"}},
		{"within a room", []string{"handles/a.go", imp("handles", "handles/wire")}, nil},
		{"the driver's interface is at the bottom", []string{"internal/driver/a.go", imp("driver", "cuda")}, []string{"internal/driver imports cuda"}},
		{"cuda does not know the software driver", []string{"cuda/a.go", imp("cuda", "cuda/sim")}, []string{"cuda imports cuda/sim"}},
		{"nor does a room above link it", []string{"vmm/a.go", imp("vmm", "cuda/sim")}, []string{"take a *cuda.System from the caller"}},
		{"programs choose a driver", []string{"cuda/auto/a.go", imp("auto", "cuda/sim"), "samples/01/main.go", imp("main", "cuda/auto"), "cmd/x/main.go", imp("main", "cuda/auto")}, nil},
		{"tests use the software driver", []string{"cuda/a_test.go", imp("cuda_test", "cuda/sim")}, nil},
		{"and nothing else from above", []string{"cuda/a_test.go", imp("cuda_test", "vmm")}, []string{"cuda imports vmm"}},
		{"up through internal", []string{"cuda/a.go", imp("cuda", "internal/x"), "internal/x/a.go", imp("x", "internal/y"), "internal/y/a.go", imp("y", "vmm")},
			[]string{"cuda imports vmm (through internal/x, internal/y), but"}},
		{"a test of internal may look up", []string{"cuda/a.go", imp("cuda", "internal/x"), "internal/x/a_test.go", imp("x", "vmm")}, nil},
		{"a new folder", []string{"kv/a.go", "package kv\n"}, []string{"kv/a.go: the folder kv is in no room"}},
	} {
		t.Run(c.name, func(t *testing.T) { wantComplaints(t, checkLayers(given(t, c.files...)), c.want...) })
	}
}

func TestSystemCalls(t *testing.T) {
	unix := "package p\n\nimport \"golang.org/x/sys/unix\"\n"
	wantComplaints(t, checkSystemCalls(given(t, "internal/fd/fd.go", unix, "handles/a_test.go", unix, "handles/a.go", unix)),
		"handles/a.go:3: golang.org/x/sys/unix outside internal/")
}

func TestTestLibraries(t *testing.T) {
	wantComplaints(t, checkTestLibraries(given(t,
		"cuda/sim/a.go", "package sim\n\nimport \"testing\"\n",
		"cuda/sim/a_test.go", "package sim\n\nimport \"github.com/stretchr/testify/require\"\n",
		"internal/test/helper/a.go", "package helper\n\nimport \"github.com/stretchr/testify/require\"\n",
		"internal/x/a.go", "package x\n\nimport \"testing\"\n",
		"vmm/a.go", "package vmm\n\nimport \""+modulePath+"/internal/test/helper\"\n",
	)), "cuda/sim/a.go:3: testing would be linked", "internal/x/a.go:3: testing would be linked", "vmm/a.go:3: "+modulePath+"/internal/test/helper would be linked")
}
