//go:build unix

package reexec_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func init() {
	reexec.Register("echo", func(c *reexec.Child) error {
		fmt.Println("printing harms no message")
		for {
			var s string
			if err := c.Recv(&s); errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return err
			}
			if err := c.Send(strings.Join(append(c.Args, s), " ")); err != nil {
				return err
			}
		}
	})
	reexec.Register("read", func(c *reexec.Child) error {
		for _, f := range c.Files {
			b, err := io.ReadAll(f)
			if err != nil {
				return err
			}
			if err := c.Send(string(b)); err != nil {
				return err
			}
		}
		return nil
	})
	reexec.Register("fail", func(*reexec.Child) error { return errors.New("no luck") })
	reexec.Register("panic", func(*reexec.Child) error { panic("no way") })
	reexec.Register("hang", func(c *reexec.Child) error {
		if err := c.Send(os.Getpid()); err != nil {
			return err
		}
		time.Sleep(time.Hour)
		return nil
	})
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMessagesTravelBothWays(t *testing.T) {
	c := reexec.Command(t, "echo", "you", "said")
	c.Start()
	for _, s := range []string{"one", "two\nlines", ""} {
		c.Send(s)
		var got string
		c.Recv(&got)
		require.Equal(t, "you said "+s, got)
	}
	c.Wait()
	require.Equal(t, "printing harms no message\n", c.Log())
}

func TestChildGetsTheFilesInOrder(t *testing.T) {
	c := reexec.Command(t, "read")
	for _, s := range []string{"first", "second"} {
		r, w, err := os.Pipe()
		require.NoError(t, err)
		_, err = w.WriteString(s)
		require.NoError(t, err)
		require.NoError(t, w.Close())
		defer r.Close()
		c.ExtraFiles = append(c.ExtraFiles, r)
	}
	c.Start()
	var first, second string
	c.Recv(&first)
	c.Recv(&second)
	c.Wait()
	require.Equal(t, []string{"first", "second"}, []string{first, second})
}

func TestFailureAndPanicAreToldFromSuccess(t *testing.T) {
	for name, want := range map[string]string{"fail": "no luck", "panic": "panic: no way"} {
		t.Run(name, func(t *testing.T) {
			c := reexec.Command(t, name)
			c.Start()
			var exit *exec.ExitError
			require.ErrorAs(t, c.Exit(), &exit)
			require.NotZero(t, exit.ExitCode())
			require.Contains(t, c.Log(), want)
		})
	}
}

func TestChildIsKilledWhenItsTestEnds(t *testing.T) {
	var pid int
	t.Run("its test", func(t *testing.T) {
		c := reexec.Command(t, "hang")
		c.Start()
		c.Recv(&pid)
		require.NoError(t, syscall.Kill(pid, 0))
	})
	require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH)
}

func TestChildIsKilledWhenItsTimeIsUp(t *testing.T) {
	c := reexec.Command(t, "hang")
	c.Timeout = 500 * time.Millisecond
	start := time.Now()
	c.Start()
	var exit *exec.ExitError
	require.ErrorAs(t, c.Exit(), &exit)
	require.GreaterOrEqual(t, time.Since(start), c.Timeout)
	require.Contains(t, c.Log(), "killed after its 500ms")
}

func TestKillIsACrash(t *testing.T) {
	c := reexec.Command(t, "hang")
	c.Start()
	var pid int
	c.Recv(&pid)
	c.Kill()
	require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH)
	require.Equal(t, syscall.SIGKILL, c.ProcessState.Sys().(syscall.WaitStatus).Signal())
}

func TestFailuresEndTheTestWithTheChildsWords(t *testing.T) {
	for _, row := range []struct {
		name string
		run  func(t testing.TB)
		want string
	}{
		{"unknown name", func(t testing.TB) { reexec.Command(t, "unknown") }, `no function "unknown"`},
		{"wait for one that fails", func(t testing.TB) {
			c := reexec.Command(t, "fail")
			c.Start()
			c.Wait()
		}, "no luck"},
		{"message from one that panics", func(t testing.TB) {
			c := reexec.Command(t, "panic")
			c.Start()
			var s string
			c.Recv(&s)
		}, "panic: no way"},
	} {
		t.Run(row.name, func(t *testing.T) {
			spy := &fatal{TB: t}
			func() {
				defer func() {
					if r := recover(); r != nil && r != spy {
						panic(r)
					}
				}()
				row.run(spy)
			}()
			require.Contains(t, spy.message, row.want)
		})
	}
}

// A name that is registered too late must not run the tests in the child.
func TestUnknownChildDoesNotRunTheTests(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	out, err := exec.CommandContext(t.Context(), self, "-reexec.child=unknown", "1s").CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "flag provided but not defined: -reexec.child")
}

func TestNameIsRegisteredOnce(t *testing.T) {
	require.PanicsWithValue(t, `reexec: "echo" is registered twice`, func() { reexec.Register("echo", nil) })
}

// fatal is a test whose end is noted and not carried out.
type fatal struct {
	testing.TB
	message string
}

func (f *fatal) Fatalf(format string, args ...any) {
	f.message = fmt.Sprintf(format, args...)
	panic(f)
}
