//go:build linux

package environ_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cuvmm/cuvmm/internal/environ"
	"github.com/stretchr/testify/require"
)

const variable = "CUVMM_ENVIRON_TEST"

// The copies of this test's program print what they read of the variable.
func init() {
	if strings.HasPrefix(filepath.Base(os.Args[0]), "prints-") {
		fmt.Print(environ.Get(variable), " in ", environ.TempDir())
		os.Exit(0)
	}
}

func TestGet(t *testing.T) {
	t.Setenv(variable, "value")
	require.Equal(t, "value", environ.Get(variable))
	require.Empty(t, environ.Get(variable+"_UNSET"))
	t.Setenv("TMPDIR", "/elsewhere")
	require.Equal(t, "/elsewhere", environ.TempDir())
}

// A program with raised rights reads nothing that its caller can set.
func TestAProgramWithRaisedRights(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root makes programs that belong to another user")
	}
	program, err := os.ReadFile("/proc/self/exe")
	require.NoError(t, err)
	dir := t.TempDir()
	for at := dir; at != "/"; at = filepath.Dir(at) { // an unprivileged user must reach it
		if info, err := os.Stat(at); err == nil && info.Mode()&0o001 == 0 {
			require.NoError(t, os.Chmod(at, info.Mode()|0o011))
		}
	}
	for name, row := range map[string]struct {
		mode os.FileMode
		want string
	}{
		"plain":     {0o755, "value in /elsewhere"},
		"setuid":    {0o755 | os.ModeSetuid, " in /tmp"},
		"setgid":    {0o755 | os.ModeSetgid, " in /tmp"},
		"both bits": {0o755 | os.ModeSetuid | os.ModeSetgid, " in /tmp"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, "prints-"+strings.ReplaceAll(name, " ", "-"))
			require.NoError(t, os.WriteFile(path, program, 0o755))
			require.NoError(t, os.Chmod(path, row.mode))
			cmd := exec.Command(path)
			cmd.Env = []string{variable + "=value", "TMPDIR=/elsewhere"}
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Equal(t, row.want, string(out))
		})
	}
}
