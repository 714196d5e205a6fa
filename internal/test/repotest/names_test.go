package repotest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	namedCode = regexp.MustCompile("`([A-Za-z0-9_./-]+\\.[a-z]+)(?:: ([A-Za-z0-9_.]+))?`")
	namedFile = regexp.MustCompile(`\]\(([A-Za-z0-9_./-]+)(#[a-z-]*)?\)`)
)

// namesCode are the documents in which every name of code is resolved.
func namesCode(name string) bool {
	return name == "ARCHITECTURE.md" || strings.HasPrefix(name, "docs/life-")
}

// checkNames: what a map names is there. A name is `path/file.go: Func`,
// `path/file.go: Type.Method`, or a file alone; a link leads to a file or a folder.
func checkNames(tr *tree) []string {
	var complaints []string
	for _, doc := range tr.files {
		if !strings.HasSuffix(doc, ".md") || strings.Contains(doc, "testdata/") {
			continue
		}
		n := 0
		for line := range strings.Lines(tr.read(doc)) {
			n++
			complain := func(format string, args ...any) {
				complaints = append(complaints, fmt.Sprintf("%s:%d: %s: it was renamed or moved, so name what is there now", doc, n, fmt.Sprintf(format, args...)))
			}
			for _, m := range namedFile.FindAllStringSubmatch(line, -1) {
				if !tr.has(relative(doc, m[1])) {
					complain("links to %s, which is not there", m[1])
				}
			}
			if !namesCode(doc) {
				continue
			}
			for _, m := range namedCode.FindAllStringSubmatch(line, -1) {
				file, name := m[1], m[2]
				switch {
				case strings.Contains(file, "/") && !tr.has(file):
					complain("names %s, which is not there", file)
				case name != "" && !tr.declares(file, name):
					complain("names %s of %s, which does not declare it", name, file)
				}
			}
		}
	}
	return complaints
}

// relative returns a link's target from the folder of its document.
func relative(doc, target string) string {
	parts := strings.Split(doc, "/")
	parts = parts[:len(parts)-1]
	for p := range strings.SplitSeq(strings.TrimSuffix(target, "/"), "/") {
		switch {
		case p == "..":
			parts = parts[:max(0, len(parts)-1)]
		case p != ".":
			parts = append(parts, p)
		}
	}
	return strings.Join(parts, "/")
}

// has reports whether the tree has a file or a folder.
func (tr *tree) has(name string) bool {
	return slices.ContainsFunc(tr.files, func(f string) bool { return f == name || strings.HasPrefix(f, name+"/") })
}

// declares reports whether a Go file has a function, a method ("Type.Method"), a type,
// a constant or a variable of that name.
func (tr *tree) declares(file, name string) bool {
	if !tr.has(file) {
		return false
	}
	f, err := parser.ParseFile(token.NewFileSet(), file, tr.read(file), parser.SkipObjectResolution)
	if err != nil {
		return false
	}
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			full := d.Name.Name
			if d.Recv != nil {
				full = typeName(d.Recv.List[0].Type) + "." + full
			}
			if full == name {
				return true
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.TypeSpec:
					if s.Name.Name == name {
						return true
					}
				case *ast.ValueSpec:
					for _, v := range s.Names {
						if v.Name == name {
							return true
						}
					}
				}
			}
		}
	}
	return false
}

func TestNames(t *testing.T) {
	const code = "package p\n\ntype T[K any] struct{}\n\nfunc (t *T[K]) M() {}\n\nfunc F() {}\n\nvar v, w = 1, 2\n"
	wantComplaints(t, checkNames(given(t,
		"p/a.go", code,
		"docs/life-a.md", "`p/a.go: F`, `p/a.go: T.M`, `p/a.go: w`, `p/a.go`, `a.go`, [p](../p), [a](../p/a.go)\n\n"+
			"`p/a.go: M` `p/b.go`\n`p/a.go: T.F` `p/b.go: F`\n[b](b.md) [c](../ARCHITECTURE.md#x)\n",
		"ARCHITECTURE.md", "`p/a.go: G` [d](docs/) [e](https://example.com/a)\n",
		"README.md", "`p/a.go: G` [gone](docs/gone.md)\n",
	)),
		"ARCHITECTURE.md:1: names G of p/a.go",
		"README.md:1: links to docs/gone.md",
		"docs/life-a.md:3: names M of p/a.go",
		"docs/life-a.md:3: names p/b.go, which is not there",
		"docs/life-a.md:4: names T.F of p/a.go",
		"docs/life-a.md:4: names p/b.go, which is not there",
		"docs/life-a.md:5: links to b.md")
}
