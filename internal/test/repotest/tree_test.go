// Package repotest holds the rules of the repository as tests, so that a plain
// `go test ./...` checks them: what may import what, what the module may
// require, what must not be in a source file.
//
// A rule is a function from a tree of files to complaints. [TestRepository]
// applies all of them to the repository; each has a table test that breaks it
// on purpose.
package repotest

import (
	"fmt"
	"go/build/constraint"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
)

const modulePath = "github.com/cuvmm/cuvmm"

// A rule returns complaints: where, what is wrong, what to do.
type rule func(*tree) []string

var rules = map[string]rule{
	"requirements":     checkRequirements,
	"nested modules":   checkNestedModules,
	"version":          checkVersion,
	"imports run down": checkLayers,
	"system calls":     checkSystemCalls,
	"testing code":     checkTestLibraries,
	"cgo":              checkCgo,
	"c sources":        checkCSources,
	"text":             checkText,
	"names":            checkNames,
	"sizes":            checkSizes,
	"environment":      checkEnviron,
	"builders":         checkBuilders,
}

func TestRepository(t *testing.T) {
	tr := repository(t)
	for name, check := range rules {
		t.Run(name, func(t *testing.T) {
			for _, complaint := range check(tr) {
				t.Error(complaint)
			}
		})
	}
}

// A tree is the files of a repository, their Go files read as far as the
// imports.
type tree struct {
	fs    fs.FS
	files []string // slash-separated, relative to the root, sorted
	gos   []goFile
}

type goFile struct {
	path, dir  string
	test       bool
	imports    []goImport
	constraint string // the //go:build line, "" without one
}

type goImport struct {
	path string
	at   string // file:line
}

// inModule returns the folder of an import of this repository.
func (i goImport) inModule() (dir string, ok bool) {
	if i.path == modulePath {
		return ".", true
	}
	return strings.CutPrefix(i.path, modulePath+"/")
}

func newTree(fsys fs.FS, files []string) (*tree, error) {
	tr := &tree{fs: fsys, files: slices.Sorted(slices.Values(files))}
	set := token.NewFileSet()
	for _, name := range tr.files {
		if path.Ext(name) != ".go" || slices.Contains(strings.Split(name, "/"), "testdata") {
			continue
		}
		src, err := fs.ReadFile(fsys, name)
		if err != nil {
			return nil, err
		}
		f, err := parser.ParseFile(set, name, src, parser.ImportsOnly)
		if err != nil {
			return nil, fmt.Errorf("reading the imports: %w", err)
		}
		g := goFile{
			path: name, dir: path.Dir(name),
			test: strings.HasSuffix(name, "_test.go"), constraint: buildLine(string(src)),
		}
		for _, spec := range f.Imports {
			p, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return nil, fmt.Errorf("%s: import %s: %w", name, spec.Path.Value, err)
			}
			pos := set.Position(spec.Pos())
			g.imports = append(g.imports, goImport{p, fmt.Sprintf("%s:%d", name, pos.Line)})
		}
		tr.gos = append(tr.gos, g)
	}
	return tr, nil
}

// read returns a file that the tree lists.
func (tr *tree) read(name string) string {
	b, err := fs.ReadFile(tr.fs, name)
	if err != nil {
		panic(fmt.Sprintf("%s vanished while the rules were read: %v", name, err))
	}
	return string(b)
}

// goFolders returns the folders that hold a Go file.
func (tr *tree) goFolders() map[string]bool {
	dirs := map[string]bool{}
	for _, g := range tr.gos {
		dirs[g.dir] = true
	}
	return dirs
}

// buildLine returns the //go:build line, which stands before any code.
func buildLine(src string) string {
	for line := range strings.Lines(src) {
		line = strings.TrimSpace(line)
		switch {
		case constraint.IsGoBuild(line):
			return line
		case line != "" && !strings.HasPrefix(line, "//"):
			return ""
		}
	}
	return ""
}

// repository reads the checkout that the test runs in. A test binary that was
// carried to another machine has no sources about it: that is the one skip.
func repository(t *testing.T) *tree {
	t.Helper()
	root := repositoryRoot(t)
	files, err := listFiles(root)
	require.NoError(t, err)
	tr, err := newTree(os.DirFS(root), files)
	require.NoError(t, err)
	return tr
}

// repositoryRoot is the folder of the checkout; without one the test is skipped.
func repositoryRoot(t *testing.T) string {
	t.Helper()
	if _, err := os.Stat("tree_test.go"); err != nil {
		t.Skip("the repository's sources are not here: this test binary runs away from its checkout")
	}
	dir, err := os.Getwd()
	require.NoError(t, err)
	root := filepath.Dir(filepath.Dir(filepath.Dir(dir)))
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	require.NoError(t, err, "the sources are here, so the root's go.mod must be three folders up")
	require.Contains(t, string(mod), "module "+modulePath+"\n")
	return root
}

// listFiles returns what git tracks or would add. Without git, and in a copy that is not
// a checkout, it returns every file that .gitignore does not name.
//
// The walk comes first in any case: `go test` reuses an old result unless a folder or
// file that the test itself opened has changed.
func listFiles(root string) ([]string, error) {
	var names []string
	err := fs.WalkDir(os.DirFS(root), ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && slices.Contains([]string{".git", "build", ".gpu", "vendor"}, name):
			return fs.SkipDir
		case d.Type().IsRegular() && !strings.HasSuffix(name, ".test"):
			names = append(names, name)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(filepath.Join(root, ".git")); err != nil {
		return names, nil
	}
	out, err := exec.Command("git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		return names, nil
	}
	known := map[string]bool{}
	for name := range strings.SplitSeq(string(out), "\x00") {
		known[name] = true
	}
	return slices.DeleteFunc(names, func(name string) bool { return !known[name] }), nil
}

// given makes a tree of a test's own: name and contents in turn.
func given(t *testing.T, nameAndText ...string) *tree {
	t.Helper()
	fsys, names := fstest.MapFS{}, []string{}
	for i := 0; i < len(nameAndText); i += 2 {
		fsys[nameAndText[i]] = &fstest.MapFile{Data: []byte(nameAndText[i+1])}
		names = append(names, nameAndText[i])
	}
	tr, err := newTree(fsys, names)
	require.NoError(t, err)
	return tr
}

// wantComplaints requires as many complaints as wanted, each with its text.
func wantComplaints(t *testing.T, got []string, want ...string) {
	t.Helper()
	require.Len(t, got, len(want), "complaints: %q", got)
	for i := range want {
		require.Contains(t, got[i], want[i])
	}
}

// Both ways of listing must see the same files, or a rule would hold in a
// clone and not in a copy.
func TestListingWithoutGit(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"go.mod", "vmm/a.go", "build/out.go", "vmm/vmm.test"} {
		p := filepath.Join(dir, filepath.FromSlash(name))
		require.NoError(t, os.MkdirAll(filepath.Dir(p), 0o755))
		require.NoError(t, os.WriteFile(p, []byte("package x\n"), 0o644))
	}
	names, err := listFiles(dir)
	require.NoError(t, err)
	require.Equal(t, []string{"go.mod", "vmm/a.go"}, names)

	require.NoError(t, os.WriteFile(filepath.Join(dir, ".gitignore"), []byte("/build/\n*.test\n/.gitignore\n"), 0o644))
	require.NoError(t, exec.Command(needs.Program(t, "git"), "-C", dir, "init", "-q").Run())
	names, err = listFiles(dir)
	require.NoError(t, err)
	require.Equal(t, []string{"go.mod", "vmm/a.go"}, slices.Sorted(slices.Values(names)))
}
