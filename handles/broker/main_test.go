//go:build linux

package broker_test

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"go.uber.org/goleak"
)

// role has the test binary run as another process.
const role = "CUVMM_TEST_ROLE"

var roles = map[string]func(args []string) error{"broker": serveRole, "client": clientRole, "bench": benchRole, "stranger": strangerRole, "publisher": publisherRole, "writer": writerRole, "copier": copierRole}

func TestMain(m *testing.M) {
	if f := roles[os.Getenv(role)]; f != nil {
		if err := f(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, os.Getenv(role)+":", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// as returns the command of this binary in a role.
func as(name string, arguments ...string) *exec.Cmd {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	c := exec.Command(self, arguments...)
	c.Env = append(os.Environ(), role+"="+name, "GORACE=atexit_sleep_ms=20 "+os.Getenv("GORACE"))
	return c
}
