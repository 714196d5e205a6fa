package installtest

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/internal/test/needs"
)

// A C program is compiled with what pkg-config says of the installed library, runs on it,
// and refers to it by its soname.
func TestCLibrary(t *testing.T) {
	needsCgo(t)
	cc, pkgConfig := needs.Program(t, "cc"), needs.Program(t, "pkg-config")
	stage := t.TempDir()
	install := exec.Command("bash", filepath.Join(root, "scripts", "install-libcuvmm.sh"))
	install.Env = append(os.Environ(), "DESTDIR="+stage, "PREFIX=/usr")
	execute(t, install)

	query := exec.Command(pkgConfig, "--cflags", "--libs", "libcuvmm")
	query.Env = append(os.Environ(), "PKG_CONFIG_LIBDIR="+stage+"/usr/lib/pkgconfig", "PKG_CONFIG_SYSROOT_DIR="+stage,
		"PKG_CONFIG_ALLOW_SYSTEM_CFLAGS=1", "PKG_CONFIG_ALLOW_SYSTEM_LIBS=1") // under the staging folder /usr is no system's
	program := filepath.Join(t.TempDir(), "pool")
	execute(t, exec.Command(cc, append([]string{"-Wall", "-Werror", "-o", program, "testdata/pool.c"}, strings.Fields(execute(t, query))...)...))

	binary, err := elf.Open(program)
	require.NoError(t, err)
	defer binary.Close()
	needed, err := binary.ImportedLibraries()
	require.NoError(t, err)

	run := exec.Command(program)
	run.Env = append(os.Environ(), "CUVMM_DRIVER=sim", "LD_LIBRARY_PATH="+stage+"/usr/lib")
	out := regexp.MustCompile(`^version (\d+): a block of 1000 bytes, then 0 blocks\n$`).FindStringSubmatch(execute(t, run))
	require.NotNil(t, out)
	require.Contains(t, needed, "libcuvmm.so."+out[1])
}
