package imex_test

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/cuvmm/cuvmm/internal/imex"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fixture is a folder with the three places.
type fixture struct {
	t     *testing.T
	paths imex.Paths
}

func newFixture(t *testing.T, devices, params string) fixture {
	dir := t.TempDir()
	f := fixture{t, imex.Paths{
		Devices: filepath.Join(dir, "devices"), Params: filepath.Join(dir, "params"), Nodes: filepath.Join(dir, "nodes"),
	}}
	require.NoError(t, os.WriteFile(f.paths.Devices, []byte(devices), 0o644))
	require.NoError(t, os.WriteFile(f.paths.Params, []byte(params), 0o644))
	require.NoError(t, os.Mkdir(f.paths.Nodes, 0o755))
	return f
}

// channel makes a file that stands for a channel's: a link to a device file
// that every system has.
func (f fixture) channel(name, device string) {
	f.t.Helper()
	if runtime.GOOS != "linux" {
		f.t.Skip("device files of channels need Linux")
	}
	require.NoError(f.t, os.Symlink(device, filepath.Join(f.paths.Nodes, name)))
}

func (f fixture) read() imex.Facts { return imex.Read(f.paths) }

const (
	devices = "Character devices:\n  1 mem\n  4 tty\n510 nvidia-caps-imex-channels\n\nBlock devices:\n259 blkext\n"
	// The major of /dev/null (1:3), /dev/zero (1:5) and /dev/full (1:7).
	mem    = "Character devices:\n  1 nvidia-caps-imex-channels\n"
	params = "ResmanDebugLevel: 4294967295\nImexChannelCount: 2048\nCreateImexChannel0: 0\nRmMsg: \"\"\nRegistryDwords: \"a:b\"\n"
)

func TestMajor(t *testing.T) {
	for _, c := range []struct {
		name, text string
		want       int
		err        string
	}{
		{"there", devices, 510, ""},
		{"absent", "Character devices:\n  1 mem\n195 nvidia\n", 0, ""},
		{"another of a longer name", "Character devices:\n 510 nvidia-caps-imex-channels2\n 511 nvidia-caps\n", 0, ""},
		{"a block device", "Character devices:\n  1 mem\n\nBlock devices:\n510 nvidia-caps-imex-channels\n", 0, ""},
		{"no number", "Character devices:\nx nvidia-caps-imex-channels\n", 0, "has no major"},
		{"empty", "", 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := newFixture(t, c.text, params).read()
			require.Equal(t, c.want, got.Major)
			if c.err == "" {
				require.NoError(t, got.MajorErr)
			} else {
				require.ErrorContains(t, got.MajorErr, c.err)
			}
		})
	}
	f := newFixture(t, devices, params)
	require.NoError(t, os.Remove(f.paths.Devices))
	require.ErrorIs(t, f.read().MajorErr, os.ErrNotExist)
}

func TestParams(t *testing.T) {
	for _, c := range []struct {
		name, text string
		count      int
		zero       bool
	}{
		{"usual", params, 2048, false},
		{"off", "ImexChannelCount: 0\n", 0, false},
		{"channel 0 is made", "ImexChannelCount: 16\nCreateImexChannel0: 1\n", 16, true},
		{"an older module", "ResmanDebugLevel: 1\n", -1, false},
		{"not numbers", "ImexChannelCount: many\nCreateImexChannel0: \n", -1, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := newFixture(t, devices, c.text).read()
			require.NoError(t, got.ParamsErr)
			require.Equal(t, c.count, got.Count)
			require.Equal(t, c.zero, got.CreateChannel0)
		})
	}
	f := newFixture(t, devices, params)
	require.NoError(t, os.Remove(f.paths.Params))
	got := f.read()
	require.ErrorIs(t, got.ParamsErr, os.ErrNotExist)
	require.Equal(t, -1, got.Count)
}

func TestChannels(t *testing.T) {
	f := newFixture(t, mem, params)
	f.channel("channel7", "/dev/full")
	f.channel("channel3", "/dev/null")
	f.channel("channel10", "/dev/null") // another device than its name says
	for _, other := range []string{"channel", "channel03", "channelx", "channel-1", "kanal1", "channel99999999999"} {
		f.channel(other, "/dev/null")
	}
	require.NoError(t, os.WriteFile(filepath.Join(f.paths.Nodes, "channel4"), nil, 0o600))
	got := f.read()
	require.NoError(t, got.ChannelsErr)
	var minors, open []int
	for _, c := range got.Channels {
		minors = append(minors, c.Minor)
	}
	for _, c := range got.Accessible() {
		open = append(open, c.Minor)
	}
	require.Equal(t, []int{3, 4, 7, 10}, minors)
	require.Equal(t, []int{3, 7}, open)
	null := got.Channels[0]
	require.Equal(t, [2]int{1, 3}, null.Device)
	require.Equal(t, os.FileMode(0o666), null.Mode)
	require.Equal(t, filepath.Join(f.paths.Nodes, "channel3"), null.Path)
	plain := got.Channels[1]
	require.Equal(t, [2]int{}, plain.Device)
	require.Equal(t, os.FileMode(0o600), plain.Mode)
	require.Equal(t, os.Getuid(), plain.UID)

	// Where the major is not known, the names must do.
	require.NoError(t, os.Remove(f.paths.Devices))
	require.Len(t, f.read().Accessible(), 2)
}

func TestNoFolderHoldsNoChannels(t *testing.T) {
	f := newFixture(t, devices, params)
	require.NoError(t, os.Remove(f.paths.Nodes))
	got := f.read()
	require.NoError(t, got.ChannelsErr)
	require.Empty(t, got.Channels)
}

// A channel that cannot be read hides none of the others.
func TestADanglingNodeIsAnError(t *testing.T) {
	f := newFixture(t, mem, params)
	f.channel("channel1", filepath.Join(f.paths.Nodes, "nothing"))
	f.channel("channel3", "/dev/null")
	got := f.read()
	require.ErrorIs(t, got.ChannelsErr, os.ErrNotExist)
	require.ErrorContains(t, got.ChannelsErr, "channel1")
	require.Len(t, got.Accessible(), 1)
	require.Equal(t, 3, got.Accessible()[0].Minor)
}
