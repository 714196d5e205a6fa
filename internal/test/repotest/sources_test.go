package repotest

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// cgoFolders are where C may be called. Elsewhere a build without a C compiler
// would lose the package, and each crossing would need its own care.
var cgoFolders = []string{"csrc", "cmd/libcuda", "cmd/libcuvmm", "internal/test/cbench"}

func checkCgo(tr *tree) []string {
	var complaints []string
	for _, g := range tr.gos {
		for _, imp := range g.imports {
			switch {
			case imp.path != "C":
			case !slices.Contains(cgoFolders, g.dir):
				complaints = append(complaints, fmt.Sprintf("%s: import \"C\" outside %s: add a method to internal/driver and to csrc, or a loop to internal/test/cbench", imp.at, strings.Join(cgoFolders, ", ")))
			case g.constraint == "":
				complaints = append(complaints, fmt.Sprintf("%s: import \"C\" without a build constraint: add //go:build cgo and the systems it is for", imp.at))
			}
		}
	}
	return complaints
}

var (
	cExtensions  = []string{".c", ".h", ".s", ".S", ".cc", ".cpp"}
	includeLine  = regexp.MustCompile(`#\s*include\s+"([^"]+)"`)
	cgoFlagsLine = regexp.MustCompile(`#cgo\s+[^:\n]*(CFLAGS|CPPFLAGS|LDFLAGS):([^\n]*)`)
)

// checkCSources: the C of a Go package is built exactly when its Go is, and
// nothing that it includes lies where `go mod vendor` does not look.
func checkCSources(tr *tree) []string {
	var complaints []string
	goFolders := tr.goFolders()
	constraints := map[string][]string{} // of the Go files that use cgo, by folder
	for _, g := range tr.gos {
		cgo := slices.ContainsFunc(g.imports, func(i goImport) bool { return i.path == "C" })
		if cgo && !slices.Contains(constraints[g.dir], g.constraint) {
			constraints[g.dir] = append(constraints[g.dir], g.constraint)
		}
	}
	for _, name := range tr.files {
		dir, ext := path.Dir(name), path.Ext(name)
		isC := slices.Contains(cExtensions, ext)
		if !goFolders[dir] || !(isC || ext == ".go") {
			continue
		}
		src := tr.read(name)
		if (ext == ".c" || ext == ".h") && !slices.Contains(constraints[dir], buildLine(src)) {
			complaints = append(complaints, fmt.Sprintf("%s:1: begin it with the //go:build line of its package's cgo files (here %q), or it is built where they are not", name, constraints[dir]))
		}
		if len(constraints[dir]) == 0 {
			continue
		}
		for _, m := range includeLine.FindAllStringSubmatch(src, -1) {
			if target := path.Join(dir, m[1]); slices.Contains(tr.files, target) && !goFolders[path.Dir(target)] {
				complaints = append(complaints, fmt.Sprintf("%s: includes %s, whose folder holds no Go file, so `go mod vendor` loses it: move it beside the package, or put a Go file there", name, target))
			}
		}
		for _, m := range cgoFlagsLine.FindAllStringSubmatch(src, -1) {
			if m[1] == "LDFLAGS" && strings.TrimSpace(m[2]) != "-ldl" {
				complaints = append(complaints, fmt.Sprintf("%s: links with%s: -ldl alone is linked, everything else is opened at run time", name, m[2]))
			}
			if strings.Contains(m[2], "-I") {
				complaints = append(complaints, fmt.Sprintf("%s: compiles with%s: include by a path relative to the file", name, m[2]))
			}
		}
	}
	return complaints
}

// The patterns are put together from pieces, so that this file passes.
var forbiddenText = []struct {
	pattern *regexp.Regexp
	remedy  string
}{
	{
		regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XX` + `X|HA` + `CK)\b`),
		"a left-over mark: finish it, or say in plain words what is not supported",
	},
	{
		regexp.MustCompile(`(^|[^A-Za-z0-9_.])/(` + strings.Join([]string{"work", "root", "home", "Users"}, "|") + `)/`),
		"an absolute path of one machine: make it relative, or take it from the environment",
	},
	{
		regexp.MustCompile(strings.ReplaceAll(`\b(proxy@golang@org|sum@golang@org|deb@debian@org|archive@ubuntu@com|registry@npmjs@org|pypi@org|(index@)?docker@io|ghcr@io)\b`, "@", `\.`)),
		"the host of a package registry: leave it to the configuration of the build",
	},
}

// checkText reads every text file for what does not belong in a product.
func checkText(tr *tree) []string {
	var complaints []string
	for _, name := range tr.files {
		text := tr.read(name)
		if path.Base(name) == "go.sum" || strings.ContainsRune(text[:min(len(text), 8192)], 0) {
			continue
		}
		n := 0
		for line := range strings.Lines(text) {
			n++
			for _, f := range forbiddenText {
				if m := f.pattern.FindString(line); m != "" {
					complaints = append(complaints, fmt.Sprintf("%s:%d: %q: %s", name, n, m, f.remedy))
				}
			}
		}
	}
	return complaints
}

// largestFile is more bytes than any source has.
const largestFile = 1 << 20

// checkSizes finds what was built and added by mistake, which git keeps for ever.
func checkSizes(tr *tree) []string {
	var complaints []string
	for _, name := range tr.files {
		if n := len(tr.read(name)); n > largestFile {
			complaints = append(complaints, fmt.Sprintf("%s: %d bytes: what is built goes into build/, which git ignores", name, n))
		}
	}
	return complaints
}

func TestSizes(t *testing.T) {
	wantComplaints(t, checkSizes(given(t,
		"build.tar", strings.Repeat("x", largestFile+1),
		"source.txt", strings.Repeat("x", largestFile),
	)),
		"build.tar: 1048577 bytes")
}

func TestCgo(t *testing.T) {
	const c = "package p\n\nimport \"C\"\n"
	wantComplaints(t, checkCgo(given(t,
		"csrc/a.go", "//go:build cgo\n\n"+c,
		"csrc/b.go", c,
		"csrc/pytorch/a.go", "//go:build cgo\n\n"+c,
		"internal/test/cbench/a.go", "//go:build cgo\n\n"+c,
		"vmm/a_test.go", c,
	)),
		"csrc/b.go:3: import \"C\" without a build constraint",
		"csrc/pytorch/a.go:5: import \"C\" outside csrc, cmd/libcuda, cmd/libcuvmm, internal/test/cbench",
		"vmm/a_test.go:3: import \"C\" outside")
}

func TestCSources(t *testing.T) {
	const line = "//go:build cgo && linux\n\n"
	pkg := []string{"csrc/csrc.go", line + "package csrc\n\n// #cgo LDFLAGS: -ldl\nimport \"C\"\n"}
	for _, c := range []struct {
		name  string
		files []string
		want  []string
	}{
		{"fine", []string{"csrc/a.c", "// What it is.\n\n" + line + "#include \"a.h\"\n", "csrc/a.h", line, "csrc/kernels/a.cu", "x\n"}, nil},
		{"no constraint", []string{"csrc/a.c", "#include <x.h>\n"}, []string{"csrc/a.c:1: begin it with the //go:build line of its package's cgo files (here [\"//go:build cgo && linux\"])"}},
		{"another constraint", []string{"csrc/a.h", "//go:build cgo\n"}, []string{"csrc/a.h:1: begin it"}},
		{"after the code", []string{"csrc/a.h", "#pragma once\n" + line}, []string{"csrc/a.h:1: begin it"}},
		{"a folder lost by vendoring", []string{"csrc/a.c", line + "#include \"include/a.h\"\n", "csrc/include/a.h", line}, []string{"csrc/a.c: includes csrc/include/a.h, whose folder holds no Go file"}},
		{"another library", []string{"csrc/b.go", line + "package csrc\n\n// #cgo linux LDFLAGS: -lcuda\nimport \"C\"\n"}, []string{"csrc/b.go: links with -lcuda"}},
		{"an include path", []string{"csrc/b.go", line + "package csrc\n\n// #cgo CFLAGS: -I${SRCDIR}/x\nimport \"C\"\n"}, []string{"compiles with -I"}},
		{"C beside plain Go", []string{"vmm/a.go", "package vmm\n", "vmm/a.c", line}, []string{"vmm/a.c:1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			wantComplaints(t, checkCSources(given(t, append(slices.Clone(pkg), c.files...)...)), c.want...)
		})
	}
}

func TestText(t *testing.T) {
	mark, home, host := "TO"+"DO", "/"+"home/me", "proxy."+"golang.org"
	wantComplaints(t, checkText(given(t,
		"a.md", "fine\n"+mark+": later\n",
		"b.go", "package b // "+home+"/x\n",
		"c.sh", "GOPROXY=https://"+host+"\n",
		"d.bin", "\x00"+mark,
		"e.sh", "mktemp -d x.XX"+"XXXX; ls ./"+"work/ a/"+"root/\n",
	)),
		"a.md:2: \""+mark+"\": a left-over mark",
		"b.go:1: \" /"+"home/\": an absolute path",
		"c.sh:1: \""+host+"\": the host of a package registry")
}
