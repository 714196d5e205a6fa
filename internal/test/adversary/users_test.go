//go:build linux

package adversary

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// deed is what the other user does.
type deed struct {
	Do       string // mkdir, link, dial, connect, rename or listen
	Path, To string
	Mode     os.FileMode
}

func init() {
	reexec.Register("adversary: another user", func(c *reexec.Child) error {
		if err := confine(0, true); err != nil {
			return err
		}
		unix.Umask(0)
		for {
			var d deed
			if err := c.Recv(&d); err != nil {
				return nil //nolint:nilerr // the test is over
			}
			var said news
			if err := d.done(); err != nil {
				said.Err = err.Error()
			}
			if err := c.Send(said); err != nil {
				return err
			}
		}
	})
}

func (d deed) done() error {
	switch d.Do {
	case "mkdir":
		return os.Mkdir(d.Path, d.Mode)
	case "link":
		return os.Symlink(d.To, d.Path)
	case "rename":
		return os.Rename(d.Path, d.To)
	case "dial":
		c, err := peer.Dial(context.Background(), d.Path, peer.Options{})
		if err == nil {
			err = c.Close()
		}
		return err
	case "connect":
		w, err := connect(d.Path)
		if err == nil {
			w.close()
		}
		return err
	case "listen": // until the process ends
		l, err := peer.Listen(filepath.Dir(d.Path), filepath.Base(d.Path), peer.Options{})
		if err == nil {
			go func() { _ = publish.NewServer(publish.ServerOptions{}).Serve(context.Background(), l) }()
		}
		return err
	}
	return fmt.Errorf("no deed %q", d.Do)
}

// otherUser is a process of another user, which obeys.
type otherUser struct{ *child }

func (o otherUser) does(d deed) error {
	o.cmd.Send(d)
	if n := o.wait(); n.Err != "" {
		return errors.New(n.Err)
	}
	return nil
}

// Another user neither reaches what this user serves, nor gets this user to serve or
// to trust what is the other's.
func TestAnotherUser(t *testing.T) {
	needsRoot(t)
	top := t.TempDir()
	for at := top; at != "/" && at != os.TempDir(); at = filepath.Dir(at) {
		require.NoError(t, os.Chmod(at, 0o777))
	}
	in := func(name string) string { return filepath.Join(top, name) }
	o := otherUser{startChild(t, "another user")}
	must := func(d deed) { t.Helper(); require.NoError(t, o.does(d)) }
	listens := func(dir string) error {
		l, err := peer.Listen(dir, "s", peer.Options{})
		if err == nil {
			err = l.Close()
		}
		return err
	}
	dials := func(path string) error {
		c, err := peer.Dial(t.Context(), path, peer.Options{})
		if err == nil {
			err = c.Close()
		}
		return err
	}
	p := victim{Dir: in("mine")}.starts(t)
	p.does("announce", 1)

	t.Run("reaches nothing", func(t *testing.T) {
		require.NoError(t, os.Chmod(top, 0o755))
		defer os.Chmod(top, 0o777)
		for _, do := range []string{"dial", "connect"} {
			require.ErrorContains(t, o.does(deed{Do: do, Path: p.path}), "permission denied", do)
		}
		require.ErrorContains(t, o.does(deed{Do: "rename", Path: in("mine"), To: in("stolen")}), "permission denied")
	})
	t.Run("makes the directory first", func(t *testing.T) {
		must(deed{Do: "mkdir", Path: in("first"), Mode: 0o700})
		require.ErrorIs(t, listens(in("first")), peer.ErrPeer)
		must(deed{Do: "mkdir", Path: in("open"), Mode: 0o755})
		require.ErrorIs(t, dials(in("open/s")), peer.ErrPeer)
	})
	t.Run("puts a link in the way", func(t *testing.T) {
		require.NoError(t, os.Mkdir(in("private"), 0o700))
		must(deed{Do: "link", Path: in("link"), To: in("private")})
		require.Error(t, listens(in("link")))
		require.Error(t, listens(in("link")+"/"))
		left, err := os.ReadDir(in("private"))
		require.NoError(t, err)
		require.Empty(t, left)
	})
	t.Run("serves", func(t *testing.T) {
		must(deed{Do: "listen", Path: in("theirs/s")})
		require.ErrorIs(t, dials(in("theirs/s")), peer.ErrPeer)
		must(deed{Do: "link", Path: in("theirs/l"), To: p.path})
		require.Error(t, dials(in("theirs/l")))
	})
	t.Run("owns the machine's folder", func(t *testing.T) {
		must(deed{Do: "mkdir", Path: in("machine"), Mode: 0o700})
		must(deed{Do: "mkdir", Path: in("machine/open"), Mode: 0o777})
		for _, folder := range []string{"machine", "machine/open"} {
			_, err := sim.New(sim.Options{Folder: in(folder)})
			require.Error(t, err, folder)
		}
	})
	p.serves(1)
	p.ends()
}

// What stands where a socket should is refused, and left as it is.
func TestNoSocketThere(t *testing.T) {
	for name, puts := range map[string]func(path string) error{
		"a file":       func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"a directory":  func(path string) error { return os.Mkdir(path, 0o700) },
		"a named pipe": func(path string) error { return unix.Mkfifo(path, 0o600) },
		"a link":       func(path string) error { return os.Symlink("/etc/passwd", path) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "private")
			require.NoError(t, os.Mkdir(dir, 0o700))
			path := filepath.Join(dir, "s")
			require.NoError(t, puts(path))
			before, err := os.Lstat(path)
			require.NoError(t, err)
			_, err = peer.Listen(dir, "s", peer.Options{})
			require.Error(t, err)
			require.Error(t, within(t, "Dial", func() error {
				_, err := peer.Dial(t.Context(), path, peer.Options{})
				return err
			}))
			after, err := os.Lstat(path)
			require.NoError(t, err)
			require.True(t, os.SameFile(before, after))
		})
	}
}
