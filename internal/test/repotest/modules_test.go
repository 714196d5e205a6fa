package repotest

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"
)

// allowedRequirements are all that a user of the library downloads. Heavier
// things go into a nested module.
var allowedRequirements = []string{
	"github.com/stretchr/testify",
	"go.uber.org/goleak",
	"golang.org/x/sync",
	"golang.org/x/sys",
	"pgregory.net/rapid",
}

const nestedRemedy = "put what needs it into a nested module that replaces the root by its relative path"

// checkRequirements holds the root module to its few requirements. An import
// counts too: the mark // indirect would else be a way round.
func checkRequirements(tr *tree) []string {
	if !slices.Contains(tr.files, "go.mod") {
		return []string{"go.mod: missing"}
	}
	var complaints []string
	for _, d := range directives(tr.read("go.mod")) {
		switch d.verb {
		case "require":
			if !strings.Contains(d.comment, "indirect") && !slices.Contains(allowedRequirements, d.args[0]) {
				complaints = append(complaints, fmt.Sprintf("go.mod:%d: requires %s, and only %s may be required directly: %s", d.line, d.args[0], strings.Join(allowedRequirements, ", "), nestedRemedy))
			}
		case "replace", "exclude", "tool":
			complaints = append(complaints, fmt.Sprintf("go.mod:%d: %s: the root holds requirements alone, since users' builds ignore the rest; tools go into tools/go.mod", d.line, d.verb))
		}
	}
	nested := nestedModules(tr)
	for _, g := range tr.gos {
		if slices.ContainsFunc(nested, func(m string) bool { return strings.HasPrefix(g.path, m+"/") }) {
			continue
		}
		for _, imp := range g.imports {
			_, own := imp.inModule()
			host, _, _ := strings.Cut(imp.path, "/")
			allowed := slices.ContainsFunc(allowedRequirements, func(r string) bool { return imp.path == r || strings.HasPrefix(imp.path, r+"/") })
			if strings.Contains(host, ".") && !own && !allowed {
				complaints = append(complaints, fmt.Sprintf("%s: imports %s, which the root module may not require: %s", imp.at, imp.path, nestedRemedy))
			}
		}
	}
	return complaints
}

// checkNestedModules: a nested module that uses the library uses the one
// beside it, not a published one.
func checkNestedModules(tr *tree) []string {
	var complaints []string
	for _, dir := range nestedModules(tr) {
		file := dir + "/go.mod"
		up := strings.TrimSuffix(strings.Repeat("../", strings.Count(dir, "/")+1), "/")
		line, replaced := 0, false
		for _, d := range directives(tr.read(file)) {
			switch {
			case d.verb == "module" && d.args[0] != modulePath+"/"+dir:
				complaints = append(complaints, fmt.Sprintf("%s:%d: module %s: its path must be %s/%s, or it cannot be imported", file, d.line, d.args[0], modulePath, dir))
			case d.verb == "require" && d.args[0] == modulePath:
				line = d.line
			case d.verb == "replace" && d.args[0] == modulePath:
				replaced = d.args[len(d.args)-1] == up
			}
		}
		if line > 0 && !replaced {
			complaints = append(complaints, fmt.Sprintf("%s:%d: requires the root without replacing it: add `replace %s => %s`", file, line, modulePath, up))
		}
	}
	return complaints
}

// checkNoWorkspace: a workspace file would hide the nested modules from
// `go test ./...` at the root, and vendoring does not work with one.
func checkNoWorkspace(tr *tree) []string {
	var complaints []string
	for _, name := range tr.files {
		if base := path.Base(name); base == "go.work" || base == "go.work.sum" {
			complaints = append(complaints, name+": no workspace file is committed: remove it; scripts/test.sh tests every module")
		}
	}
	return complaints
}

// nestedModules returns the folders of the modules below the root.
func nestedModules(tr *tree) []string {
	var dirs []string
	for _, name := range tr.files {
		if path.Base(name) == "go.mod" && name != "go.mod" && !slices.Contains(strings.Split(name, "/"), "testdata") {
			dirs = append(dirs, path.Dir(name))
		}
	}
	return dirs
}

type directive struct {
	verb    string
	args    []string
	comment string
	line    int
}

// directives reads a go.mod, blocks flattened.
func directives(mod string) []directive {
	var out []directive
	block, n := "", 0
	for line := range strings.Lines(mod) {
		n++
		code, comment, _ := strings.Cut(line, "//")
		words := strings.Fields(code)
		switch {
		case len(words) == 0:
		case words[0] == ")":
			block = ""
		case words[len(words)-1] == "(":
			block = words[0]
		case block != "":
			out = append(out, directive{block, words, comment, n})
		case len(words) > 1:
			out = append(out, directive{words[0], words[1:], comment, n})
		}
	}
	return out
}

func TestRequirements(t *testing.T) {
	const fine = "module " + modulePath + "\n\ngo 1.25.0\n\nrequire golang.org/x/sys v0.1.0\n\nrequire (\n\texample.com/deep v1.0.0 // indirect\n)\n"
	for _, c := range []struct {
		name  string
		files []string
		want  []string
	}{
		{"fine", []string{"go.mod", fine, "vmm/a.go", "package vmm\n\nimport (\n\t\"net/http\"\n\t\"golang.org/x/sys/unix\"\n)\n"}, nil},
		{"no go.mod", nil, []string{"missing"}},
		{"another requirement", []string{"go.mod", fine + "require example.com/etcd v3.0.0\n"}, []string{"go.mod:10: requires example.com/etcd, and only github.com/stretchr/testify"}},
		{"imported though called indirect", []string{"go.mod", fine, "vmm/a.go", "package vmm\n\nimport \"example.com/deep\"\n"}, []string{"vmm/a.go:3: imports example.com/deep"}},
		{"a nested module may", []string{"go.mod", fine, "fabric/etcd/go.mod", "module x\n", "fabric/etcd/a.go", "package etcd\n\nimport \"example.com/etcd\"\n"}, nil},
		{"replace", []string{"go.mod", fine + "replace golang.org/x/sys => ../sys\n"}, []string{"go.mod:10: replace"}},
		{"tool", []string{"go.mod", fine + "tool golang.org/x/tools/cmd/stringer\n"}, []string{"tools go into tools/go.mod"}},
	} {
		t.Run(c.name, func(t *testing.T) { wantComplaints(t, checkRequirements(given(t, c.files...)), c.want...) })
	}
}

func TestNestedModules(t *testing.T) {
	mod := func(rest string) string { return "module " + modulePath + "/fabric/etcd\n" + rest }
	for _, c := range []struct {
		name, mod string
		want      []string
	}{
		{"does not use the root", mod(""), nil},
		{"replaces it", mod("require " + modulePath + " v0.0.0\nreplace " + modulePath + " => ../..\n"), nil},
		{"does not", mod("require (\n\t" + modulePath + " v0.0.0\n)\n"), []string{"fabric/etcd/go.mod:3: requires the root without replacing it: add `replace " + modulePath + " => ../..`"}},
		{"by another path", mod("require " + modulePath + " v0.0.0\nreplace " + modulePath + " v0.0.0 => ../../..\n"), []string{"=> ../..`"}},
		{"named otherwise", "module example.com/etcd\n", []string{"its path must be " + modulePath + "/fabric/etcd"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			wantComplaints(t, checkNestedModules(given(t, "go.mod", "", "fabric/etcd/go.mod", c.mod)), c.want...)
		})
	}
}

func TestNoWorkspace(t *testing.T) {
	wantComplaints(t, checkNoWorkspace(given(t, "go.mod", "", "go.work", "go 1.25\n", "a/go.work.sum", "")), "a/go.work.sum", "go.work: no workspace file")
}
