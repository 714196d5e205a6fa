package imex_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/imex"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
)

// readUnprivileged reports what a user without rights finds.
const readUnprivileged = "read as an unprivileged user"

func init() {
	reexec.Register(readUnprivileged, func(c *reexec.Child) error {
		if os.Geteuid() == 0 {
			if err := dropRights(); err != nil {
				return err
			}
		}
		f := imex.Read(imex.Paths{Devices: c.Args[0], Params: c.Args[1], Nodes: c.Args[2]})
		var open []int
		for _, c := range f.Accessible() {
			open = append(open, c.Minor)
		}
		return c.Send(found{open, f.UID, fmt.Sprint(f.MajorErr), fmt.Sprint(f.ChannelsErr)})
	})
}

type found struct {
	Open                  []int
	UID                   int
	MajorErr, ChannelsErr string
}

func dropRights() error {
	if err := syscall.Setgroups(nil); err != nil {
		return err
	}
	if err := syscall.Setgid(65534); err != nil {
		return err
	}
	return syscall.Setuid(65534)
}

// What root may open another user may not.
func TestAccessIsThisUsers(t *testing.T) {
	// The folder above is made for this user alone.
	dir := t.TempDir()
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o755))
	f := fixture{t, imex.Paths{Devices: filepath.Join(dir, "devices"), Params: filepath.Join(dir, "none"), Nodes: filepath.Join(dir, "nodes")}}
	require.NoError(t, os.WriteFile(f.paths.Devices, []byte(mem), 0o644))
	require.NoError(t, os.Mkdir(f.paths.Nodes, 0o755))
	f.channel("channel3", "/dev/null")
	closed := ""
	for _, name := range []string{"/dev/mem", "/dev/port", "/dev/kmsg"} { // 1:1, 1:4, 1:11: root's, where they are
		minor := map[string]string{"/dev/mem": "channel1", "/dev/port": "channel4", "/dev/kmsg": "channel11"}[name]
		if info, err := os.Stat(name); err == nil && info.Mode()&os.ModeCharDevice != 0 && info.Mode()&0o006 != 0o006 {
			f.channel(minor, name)
			closed = name
		}
	}

	child := reexec.Command(t, readUnprivileged, f.paths.Devices, f.paths.Params, f.paths.Nodes)
	child.Start()
	var got found
	child.Recv(&got)
	child.Wait()
	require.Equal(t, []int{3}, got.Open, "closed to others: %s", closed)
	if os.Geteuid() == 0 {
		require.Equal(t, 65534, got.UID)
	}
	require.True(t, slices.ContainsFunc(f.read().Channels, imex.Channel.Accessible))
	t.Logf("a file that is closed to others: %q", closed)

	if os.Geteuid() != 0 {
		return
	}
	// A folder that may not be listed, and a list that may not be read.
	require.NoError(t, os.Chmod(f.paths.Nodes, 0o700))
	require.NoError(t, os.Chmod(f.paths.Devices, 0o600))
	child = reexec.Command(t, readUnprivileged, f.paths.Devices, f.paths.Params, f.paths.Nodes)
	child.Start()
	child.Recv(&got)
	child.Wait()
	require.Contains(t, got.ChannelsErr, "permission denied")
	require.Contains(t, got.MajorErr, "permission denied")
}

// What stands at the places of the files may be anything, and holds up no reader.
func TestStrangeFiles(t *testing.T) {
	for name, put := range map[string]func(path string) error{
		"a folder":                func(path string) error { return os.Mkdir(path, 0o755) },
		"a pipe without a writer": func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"a line too long":         func(path string) error { return os.WriteFile(path, make([]byte, 1<<20), 0o600) },
		"no end of zeros":         func(path string) error { return os.Symlink("/dev/zero", path) },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, devices, params)
			for _, path := range []string{f.paths.Devices, f.paths.Params} {
				require.NoError(t, os.Remove(path))
				require.NoError(t, put(path))
			}
			read := make(chan imex.Facts, 1)
			go func() { read <- f.read() }()
			select {
			case got := <-read:
				require.ErrorContains(t, got.MajorErr, f.paths.Devices)
				require.ErrorContains(t, got.ParamsErr, f.paths.Params)
				require.Equal(t, -1, got.Count)
			case <-time.After(time.Minute):
				t.Error("it waits")
				for _, path := range []string{f.paths.Devices, f.paths.Params} {
					_ = os.WriteFile(path, nil, 0o600) // lets it go
				}
				<-read
			}
		})
	}
}
