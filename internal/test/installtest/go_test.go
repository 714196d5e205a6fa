package installtest

import (
	"archive/zip"
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The command is installed, and a user's program built, from the modules as a proxy serves
// them: without go.work, and with the requirements that each go.mod states.
func TestGoModules(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a program that requires a client of etcd")
	}
	needsCgo(t)
	version, folders := modules(t)
	proxy := t.TempDir()
	for module, folder := range folders {
		serve(t, proxy, module, version, folder)
	}
	goAs := user(t, proxy)

	goAs(t.TempDir(), "install", "github.com/cuvmm/cuvmm/cmd/cuvmm@"+version)
	out := execute(t, exec.Command(filepath.Join(goAs(".", "env", "GOBIN"), "cuvmm"), "version"))
	require.Contains(t, out, "cuvmm "+version+", ")

	program := t.TempDir()
	source, err := os.ReadFile("testdata/user.go.txt")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(program, "main.go"), source, 0o644))
	goAs(program, "mod", "init", "example.com/user")
	goAs(program, "get", "github.com/cuvmm/cuvmm@"+version, "github.com/cuvmm/cuvmm/metrics@"+version, "github.com/cuvmm/cuvmm/fabric/rendezvous/etcd@"+version, ".")
	goAs(program, "build", "-o", "user", ".")
	run := exec.Command(filepath.Join(program, "user"))
	run.Env = append(os.Environ(), "CUVMM_DRIVER=sim")
	require.Equal(t, "[1 2 3]\ncuvmm_\n/cuvmm/rendezvous/\n", execute(t, run))
}

// modules returns the version that the checkout's modules have, and their folders by path.
func modules(t *testing.T) (version string, folders map[string]string) {
	t.Helper()
	var work struct {
		Use     []struct{ DiskPath string }
		Replace []struct {
			Old struct{ Path, Version string }
		}
	}
	edit := exec.Command("go", "work", "edit", "-json")
	edit.Dir = root
	require.NoError(t, json.Unmarshal([]byte(execute(t, edit)), &work))
	require.Len(t, work.Replace, 1)
	folders = map[string]string{}
	for _, use := range work.Use {
		list := exec.Command("go", "list", "-m")
		list.Dir = filepath.Join(root, use.DiskPath)
		list.Env = append(os.Environ(), "GOWORK=off")
		folders[strings.TrimSpace(execute(t, list))] = list.Dir
	}
	return work.Replace[0].Old.Version, folders
}

// serve puts one version of a module into the folder of a proxy. The go command checks the
// archive as it checks every other.
func serve(t *testing.T, proxy, module, version, folder string) {
	t.Helper()
	at := filepath.Join(proxy, filepath.FromSlash(module), "@v")
	require.NoError(t, os.MkdirAll(at, 0o755))
	write := func(name string, content []byte) {
		require.NoError(t, os.WriteFile(filepath.Join(at, name), content, 0o644))
	}
	mod, err := os.ReadFile(filepath.Join(folder, "go.mod"))
	require.NoError(t, err)
	write("list", []byte(version+"\n"))
	write(version+".info", []byte(`{"Version":"`+version+`"}`))
	write(version+".mod", mod)

	archive, err := os.Create(filepath.Join(at, version+".zip"))
	require.NoError(t, err)
	z := zip.NewWriter(archive)
	require.NoError(t, fs.WalkDir(os.DirFS(folder), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			_, nested := os.Stat(filepath.Join(folder, name, "go.mod"))
			if name != "." && (nested == nil || slices.Contains([]string{".git", "build", ".gpu", "vendor"}, d.Name())) {
				return fs.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() {
			return nil
		}
		content, err := os.ReadFile(filepath.Join(folder, name))
		if err != nil {
			return err
		}
		entry, err := z.CreateHeader(&zip.FileHeader{Name: module + "@" + version + "/" + name})
		if err != nil {
			return err
		}
		_, err = entry.Write(content)
		return err
	}))
	require.NoError(t, z.Close())
	require.NoError(t, archive.Close())
}

// user returns a function that runs the go command in a folder as a user of the modules does:
// with a cache of its own. What the modules require comes from this machine's cache; only what
// that lacks is asked of the machine's own proxy.
func user(t *testing.T, proxy string) func(dir string, args ...string) string {
	t.Helper()
	settings := exec.Command("go", "env", "GOMODCACHE", "GOPROXY")
	cache, beyond, _ := strings.Cut(strings.TrimSpace(execute(t, settings)), "\n")
	home := t.TempDir()
	env := append(os.Environ(),
		"GOWORK=off", "GOTOOLCHAIN=local", "GOSUMDB=off", "GOPRIVATE=", "GONOPROXY=", // nothing has published these modules
		"GOFLAGS=-trimpath -modcacherw -buildvcs=false", // -trimpath: objects are found again although the folders are new
		"GOBIN="+filepath.Join(home, "bin"), "GOMODCACHE="+filepath.Join(home, "mod"),
		"GOPROXY=file://"+proxy+",file://"+filepath.Join(cache, "cache", "download")+","+beyond)
	return func(dir string, args ...string) string {
		t.Helper()
		cmd := exec.Command("go", args...)
		cmd.Dir, cmd.Env = dir, env
		return strings.TrimSpace(execute(t, cmd))
	}
}
