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

const nestedRemedy = "put what needs it into a nested module, which go.work uses"

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

// checkNestedModules: `go install` refuses a module that has a replace or an exclude, so
// a checkout joins its modules by go.work.
func checkNestedModules(tr *tree) []string {
	var complaints []string
	workspace := workspaceOf(tr)
	for _, dir := range nestedModules(tr) {
		file := dir + "/go.mod"
		for _, d := range directives(tr.read(file)) {
			switch {
			case d.verb == "module" && d.args[0] != modulePath+"/"+dir:
				complaints = append(complaints, fmt.Sprintf("%s:%d: module %s: its path must be %s/%s, or it cannot be imported", file, d.line, d.args[0], modulePath, dir))
			case d.verb == "replace" || d.verb == "exclude":
				complaints = append(complaints, fmt.Sprintf("%s:%d: %s: go install refuses a module that has one; go.work joins the modules of a checkout", file, d.line, d.verb))
			case d.verb == "require" && d.args[0] == modulePath && d.args[1] != workspace.version:
				complaints = append(complaints, fmt.Sprintf("%s:%d: requires the root as %s, and go.work replaces %q: all modules have one version", file, d.line, d.args[1], workspace.version))
			case d.verb == "require" && d.args[0] == modulePath && !slices.Contains(workspace.uses, "./"+dir):
				complaints = append(complaints, fmt.Sprintf("%s:%d: requires the root, and go.work does not use ./%s: add it", file, d.line, dir))
			}
		}
	}
	return complaints
}

// checkVersion: the Python package is released with the modules.
func checkVersion(tr *tree) []string {
	const project = "python/pyproject.toml"
	want := fmt.Sprintf("version = %q", strings.TrimPrefix(workspaceOf(tr).version, "v"))
	if !slices.Contains(tr.files, project) || strings.Contains(tr.read(project), "\n"+want+"\n") {
		return nil
	}
	return []string{fmt.Sprintf("%s: its version is not the modules': it must say %s, as go.work does", project, want)}
}

// A workspace is what go.work says: the modules that it joins, and the version of the root
// that they require.
type workspace struct {
	uses    []string
	version string
}

func workspaceOf(tr *tree) workspace {
	var w workspace
	if !slices.Contains(tr.files, "go.work") {
		return w
	}
	for _, d := range directives(tr.read("go.work")) {
		switch {
		case d.verb == "use":
			w.uses = append(w.uses, d.args[0])
		case d.verb == "replace" && d.args[0] == modulePath && d.args[len(d.args)-1] == ".":
			w.version = d.args[1]
		}
	}
	return w
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

// directives reads a go.mod or a go.work, blocks flattened.
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
	const work = "go 1.26.0\n\nuse (\n\t.\n\t./fabric/etcd\n)\n\nreplace " + modulePath + " v0.1.0 => .\n"
	mod := func(rest string) string { return "module " + modulePath + "/fabric/etcd\n" + rest }
	for _, c := range []struct {
		name, work, mod string
		want            []string
	}{
		{"does not use the root", "", mod(""), nil},
		{"uses it", work, mod("require " + modulePath + " v0.1.0\n"), nil},
		{"replaces it", work, mod("require " + modulePath + " v0.1.0\nreplace " + modulePath + " => ../..\n"), []string{"fabric/etcd/go.mod:3: replace: go install refuses"}},
		{"excludes", work, mod("exclude example.com/a v1.0.0\n"), []string{"fabric/etcd/go.mod:2: exclude"}},
		{"another version", work, mod("require (\n\t" + modulePath + " v0.0.9\n)\n"), []string{"fabric/etcd/go.mod:3: requires the root as v0.0.9, and go.work replaces \"v0.1.0\""}},
		{"outside of the workspace", strings.Replace(work, "./fabric/etcd", "./metrics", 1), mod("require " + modulePath + " v0.1.0\n"), []string{"go.work does not use ./fabric/etcd"}},
		{"named otherwise", work, "module example.com/etcd\n", []string{"its path must be " + modulePath + "/fabric/etcd"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			wantComplaints(t, checkNestedModules(given(t, "go.mod", "", "go.work", c.work, "fabric/etcd/go.mod", c.mod)), c.want...)
		})
	}
}

func TestVersion(t *testing.T) {
	tree := func(version string) *tree {
		return given(t, "go.work", "replace "+modulePath+" v0.1.0 => .\n", "python/pyproject.toml", "[project]\nversion = \""+version+"\"\n")
	}
	wantComplaints(t, checkVersion(tree("0.1.0")))
	wantComplaints(t, checkVersion(tree("0.2.0")), `python/pyproject.toml: its version is not the modules': it must say version = "0.1.0"`)
	wantComplaints(t, checkVersion(given(t, "go.work", "")))
}
