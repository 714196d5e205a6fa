package limits_test

import (
	"errors"
	"io/fs"
	"os"
	"runtime"
	"testing"
	"testing/fstest"

	"github.com/cuvmm/cuvmm/internal/limits"
	"github.com/stretchr/testify/require"
)

// on returns a machine with these files.
func on(files map[string]string) fstest.MapFS {
	m := fstest.MapFS{}
	for name, text := range files {
		m[name] = &fstest.MapFile{Data: []byte(text), Mode: 0o444}
	}
	return m
}

const gib = 1 << 30

const meminfo = "MemTotal:       67108864 kB\nMemFree:  1024 kB\nMemAvailable:   33554432 kB\nHugePages_Total:       0\n"

func TestHost(t *testing.T) {
	const v2, v1, own, mounts = "sys/fs/cgroup", "sys/fs/cgroup/memory", "proc/self/cgroup", "proc/self/mountinfo"
	for _, c := range []struct {
		name      string
		files     map[string]string
		remaining uint64
		file      string // of the tightest limit; "" if there is none
		count     int    // of limits
	}{
		{"no files", nil, 0, "", 0},
		{"the machine", map[string]string{"proc/meminfo": meminfo}, 32 * gib, "/proc/meminfo", 1},
		{"an old kernel without an estimate", map[string]string{"proc/meminfo": "MemTotal: 5 kB\n"}, 0, "", 0},
		{"more available than there is", map[string]string{"proc/meminfo": "MemTotal: 5 kB\nMemAvailable: 6 kB\n"}, 5 << 10, "/proc/meminfo", 1},
		{"a group", map[string]string{"proc/meminfo": meminfo, v2 + "/memory.max": "8589934592\n", v2 + "/memory.current": "1073741824\n"}, 7 * gib, "/sys/fs/cgroup/memory.max", 2},
		{"a group with more than the machine", map[string]string{"proc/meminfo": meminfo, v2 + "/memory.max": "1099511627776"}, 32 * gib, "/proc/meminfo", 2},
		{"max", map[string]string{v2 + "/memory.max": "max\n", v2 + "/memory.high": "max\n", v2 + "/memory.current": "5"}, 0, "", 0},
		{"high below max", map[string]string{v2 + "/memory.max": "8589934592", v2 + "/memory.high": "4294967296"}, 4 * gib, "/sys/fs/cgroup/memory.high", 2},
		{"cached files can be reclaimed", map[string]string{v2 + "/memory.max": "8589934592", v2 + "/memory.current": "8589934592", v2 + "/memory.stat": "anon 5\ninactive_file 1073741824\nactive_file 1073741824\nshmem 7\n"}, 2 * gib, "/sys/fs/cgroup/memory.max", 1},
		{"more cached than used", map[string]string{v2 + "/memory.max": "8589934592", v2 + "/memory.current": "1", v2 + "/memory.stat": "active_file 1073741824"}, 8 * gib, "/sys/fs/cgroup/memory.max", 1},
		{"more used than allowed", map[string]string{v2 + "/memory.max": "1024", v2 + "/memory.current": "4096"}, 0, "/sys/fs/cgroup/memory.max", 1},
		{"a tighter parent", map[string]string{
			own: "0::/a/b/c\n", v2 + "/a/b/c/memory.max": "8589934592", v2 + "/a/b/c/memory.current": "0",
			v2 + "/a/b/memory.max": "max", v2 + "/a/memory.max": "4294967296", v2 + "/a/memory.current": "3221225472",
			v2 + "/other/memory.max": "1",
		}, gib, "/sys/fs/cgroup/a/memory.max", 2},
		{"a namespace that began further down", map[string]string{own: "0::/../..\n", v2 + "/memory.max": "4096"}, 4096, "/sys/fs/cgroup/memory.max", 1},
		{"version 1", map[string]string{
			own: "7:cpu,cpuacct:/x\n4:memory:/a/b\n1:name=systemd:/y\n0::/\n", v1 + "/memory.limit_in_bytes": "9223372036854771712",
			v1 + "/a/memory.limit_in_bytes": "4294967296", v1 + "/a/memory.usage_in_bytes": "4294967296", v1 + "/a/memory.stat": "cache 9\ninactive_file 7\ntotal_inactive_file 1073741824\n",
			v1 + "/a/b/memory.limit_in_bytes": "8589934592", v1 + "/x/memory.limit_in_bytes": "1", v1 + "/y/memory.limit_in_bytes": "1",
		}, gib, "/sys/fs/cgroup/memory/a/memory.limit_in_bytes", 2},
		{"a group of version 1 mounted as the root", map[string]string{
			own:                           "4:memory:/docker/abc\n",
			mounts:                        "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory\n36 31 0:33 / /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n",
			v1 + "/memory.limit_in_bytes": "4096", v1 + "/docker/abc/memory.limit_in_bytes": "1",
		}, 4096, "/sys/fs/cgroup/memory/memory.limit_in_bytes", 1},
		{"a group within the mounted one", map[string]string{
			own:                                "4:memory:/docker/abc/x\n0::/\n",
			mounts:                             "35 31 0:32 /docker/abc /m rw shared:1 master:2 - cgroup none rw,memory,hugetlb\n",
			"m/x/memory.limit_in_bytes":        "4096",
			"m/memory.limit_in_bytes":          "8192",
			"m/docker/memory.limit_in_bytes":   "1",
			v1 + "/docker/unrelated/something": "",
		}, 4096, "/m/x/memory.limit_in_bytes", 2},
		{"a mount of another group whose name begins alike", map[string]string{
			own: "0::/app2\n", mounts: "35 31 0:32 /app /m rw - cgroup2 none rw\n", "m/memory.max": "4096", "m/2/memory.max": "1",
		}, 4096, "/m/memory.max", 1},
		{"version 2 beside version 1, at a place with a space", map[string]string{
			own: "4:memory:/a\n0::/b\n", mounts: "1 2 0:1 / /x\\040y rw - cgroup2 cgroup2 rw\nshort line\n3 4\n",
			"x y/b/memory.max": "8192", v1 + "/a/memory.limit_in_bytes": "4096",
		}, 4096, "/sys/fs/cgroup/memory/a/memory.limit_in_bytes", 2},
		{"numbers beyond any memory", map[string]string{v2 + "/memory.max": "18446744073709551615", v2 + "/memory.high": "99999999999999999999999999"}, 0, "", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			h, err := limits.ReadHost(on(c.files))
			require.NoError(t, err)
			require.Len(t, h, c.count, "%v", h)
			l, ok := h.Tightest()
			require.Equal(t, c.file != "", ok)
			require.Equal(t, c.file, l.File)
			require.Equal(t, c.remaining, l.Remaining())
		})
	}
}

// A file that makes no sense is named, and hides no other limit.
func TestGarbage(t *testing.T) {
	for name, text := range map[string]string{"memory.max": "lots", "memory.high": "", "memory.current": "-5", "memory.stat": "inactive_file x"} {
		files := map[string]string{"sys/fs/cgroup/a/memory.max": "8192", "sys/fs/cgroup/memory.max": "4096", "proc/self/cgroup": "0::/a"}
		files["sys/fs/cgroup/a/"+name] = text
		h, err := limits.ReadHost(on(files))
		require.ErrorContains(t, err, "/sys/fs/cgroup/a/"+name, text)
		l, ok := h.Tightest()
		require.True(t, ok)
		require.Equal(t, "/sys/fs/cgroup/memory.max", l.File)
	}
	_, err := limits.ReadHost(on(map[string]string{"proc/meminfo": "MemTotal: 5 kB\nMemAvailable: many kB\n"}))
	require.ErrorContains(t, err, `/proc/meminfo: "many" is neither a number of bytes nor max`)
	for _, text := range []string{"", "\n", "::", "0", "0::", "x:y:z:w\n::::\n", "0::not/absolute\n", "0::/a\x00b\n"} {
		h, err := limits.ReadHost(on(map[string]string{"proc/self/cgroup": text, "proc/self/mountinfo": text + " - cgroup2", "sys/fs/cgroup/memory.max": "4096"}))
		if err == nil { // a name that no file can have may be an error
			require.Len(t, h, 1, "%q", text)
		}
	}
}

// unreadable has a file that may not be read.
type unreadable struct {
	fstest.MapFS
	name string
}

func (u unreadable) ReadFile(name string) ([]byte, error) {
	if name == u.name {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
	}
	return u.MapFS.ReadFile(name)
}

func TestAFileWithoutPermissionIsAnError(t *testing.T) {
	h, err := limits.ReadHost(unreadable{on(map[string]string{"proc/meminfo": meminfo}), "sys/fs/cgroup/memory.max"})
	require.ErrorIs(t, err, fs.ErrPermission)
	require.Len(t, h, 1)
}

func TestCheckNamesLimitAskedRemainingAndRemedy(t *testing.T) {
	h, err := limits.ReadHost(on(map[string]string{"proc/meminfo": meminfo, "sys/fs/cgroup/memory.max": "8589934592", "sys/fs/cgroup/memory.current": "1073741824"}))
	require.NoError(t, err)
	require.NoError(t, h.Check(7*gib))
	err = h.Check(7*gib + 1<<20)
	require.EqualError(t, err, "7169 MiB of host memory, and 7 GiB of 8 GiB remain (/sys/fs/cgroup/memory.max)")
	var e *limits.Exceeded
	require.ErrorAs(t, err, &e)
	require.Contains(t, e.Remedy(), "memory.max")
	require.EqualValues(t, 7*gib+1<<20, e.Asked)
	require.Equal(t, "/", e.Limit.Group)

	lowest, ok := h.Lowest()
	require.True(t, ok)
	require.EqualValues(t, 8*gib, lowest.Bytes)

	require.ErrorAs(t, h[:1].Check(33*gib), &e)
	require.Contains(t, e.Remedy(), "on this machine")
	require.NoError(t, limits.Host(nil).Check(1<<62), "where nothing is known nothing is refused")
}

func TestDevices(t *testing.T) {
	const region = "drm/0000:03:00.0/vram0"
	all, err := limits.ReadDevices(on(map[string]string{
		"proc/self/cgroup":               "0::/a/b",
		"sys/fs/cgroup/a/b/dmem.max":     region + " 8589934592\nother/stolen max\n",
		"sys/fs/cgroup/a/b/dmem.current": region + " 1073741824\nother/stolen 5\n",
		"sys/fs/cgroup/a/dmem.max":       region + " 4294967296\n",
		"sys/fs/cgroup/a/dmem.current":   region + " 3221225472\nunknown 7\n",
		"sys/fs/cgroup/dmem.capacity":    region + " 17179869184\n",
		"sys/fs/cgroup/a/b/memory.max":   "nonsense, which is not read",
	}))
	require.NoError(t, err)
	require.Equal(t, map[string]limits.Limit{region: {File: "/sys/fs/cgroup/a/dmem.max", Group: "/a", Bytes: 4 * gib, Used: 3 * gib}}, all)

	all, err = limits.ReadDevices(on(map[string]string{"sys/fs/cgroup/dmem.max": region + " all\nlonely\nother 99999999999999999999999\n"}))
	require.ErrorContains(t, err, "/sys/fs/cgroup/dmem.max")
	require.Empty(t, all)
}

// The regions of a device are found by its address.
func TestTheLimitOfADevice(t *testing.T) {
	all, err := limits.ReadDevices(on(map[string]string{
		"sys/fs/cgroup/dmem.max":     "drm/0000:03:00.0/vram0 8589934592\ndrm/0000:03:00.0/stolen 4294967296\ndrm/0001:03:00.0/vram0 4096\ndrm/0000:c1:0a.0/vram0 8192\n",
		"sys/fs/cgroup/dmem.current": "drm/0000:03:00.0/vram0 1073741824\n",
	}))
	require.NoError(t, err)
	for at, want := range map[[3]int]uint64{{0, 3, 0}: 4 * gib, {1, 3, 0}: 4096, {0, 0xc1, 10}: 8192, {0, 3, 1}: 0} {
		l, ok := limits.OfPCI(all, at[0], at[1], at[2])
		require.Equal(t, want > 0, ok, at)
		require.Equal(t, want, l.Bytes, at)
	}
}

// This machine's own files are understood.
func TestThisMachine(t *testing.T) {
	h, err := limits.OfHost()
	if !errors.Is(err, os.ErrPermission) {
		require.NoError(t, err)
	}
	if l, ok := h.Tightest(); runtime.GOOS == "linux" {
		require.True(t, ok)
		require.NotZero(t, l.Bytes)
	}
	_, err = limits.OfDevices()
	if !errors.Is(err, os.ErrPermission) {
		require.NoError(t, err)
	}
}
