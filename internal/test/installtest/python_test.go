package installtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/internal/test/needs"
)

// The wheel that scripts/python-wheel.sh makes installs with pip in an environment of its
// own, and has the library, the marker of types, and the licence.
func TestWheel(t *testing.T) {
	needsCgo(t)
	python := pythonWithSetuptools(t)
	dir := t.TempDir()
	build := exec.Command("bash", filepath.Join(root, "scripts", "python-wheel.sh"), filepath.Join(dir, "wheels"), "--no-build-isolation", "--no-index")
	build.Env = append(os.Environ(), "PYTHON="+python)
	execute(t, build)
	wheels, err := filepath.Glob(filepath.Join(dir, "wheels", "*"))
	require.NoError(t, err)
	require.Len(t, wheels, 1)
	require.Regexp(t, `^cuvmm-[0-9.]+-py3-none-linux_[a-z0-9_]+\.whl$`, filepath.Base(wheels[0]))

	execute(t, exec.Command(python, "-m", "venv", filepath.Join(dir, "venv")))
	inside := filepath.Join(dir, "venv", "bin", "python")
	execute(t, exec.Command(inside, "-m", "pip", "install", "--no-index", wheels[0]))
	program, err := filepath.Abs("testdata/installed.py")
	require.NoError(t, err)
	run := exec.Command(inside, program)
	run.Dir, run.Env = dir, append(os.Environ(), "CUVMM_DRIVER=sim", "PYTHONPATH=", "CUVMM_LIBCUVMM=")
	require.Equal(t, "typed, Apache-2.0, a block\n", execute(t, run))
	licence, err := os.ReadFile(filepath.Join(root, "LICENSE"))
	require.NoError(t, err)
	copied, err := os.ReadFile(filepath.Join(root, "python", "LICENSE"))
	require.NoError(t, err)
	require.Equal(t, string(licence), string(copied), "the package has the licence of the repository")
}

// pythonWithSetuptools returns a Python that can build a wheel without a network. The first
// in PATH may lack what the system's own has.
func pythonWithSetuptools(t *testing.T) string {
	t.Helper()
	for _, python := range []string{"python3", "/usr/bin/python3"} {
		if exec.Command(python, "-c", "import setuptools, wheel, ensurepip, pip").Run() == nil {
			return python
		}
	}
	needs.Lacks(t, "a Python with pip, venv, setuptools and wheel (Debian: python3-pip python3-venv python3-setuptools python3-wheel)")
	return ""
}
