package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// smi stands in for nvidia-smi.
func smi(out string, err error) func(string, ...string) (string, error) {
	return func(name string, _ ...string) (string, error) {
		if name != "nvidia-smi" {
			return "", errNoCommand
		}
		return out, err
	}
}

func TestTop(t *testing.T) {
	program(t)
	pid := strconv.Itoa(os.Getpid())
	h := thisHost()
	h.env = none
	h.command = smi(pid+", /usr/bin/me, 500\n17, /opt/a b/python3, 1024\n17, /opt/a b/python3, 1\n18, [Not Found], [N/A]\n", nil)
	var out, complaints bytes.Buffer
	require.Equal(t, exitOK, run([]string{"top"}, &out, &complaints, h))
	var lines []string
	for _, line := range strings.Split(strings.TrimSpace(out.String()), "\n")[1:] {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	require.Equal(t, []string{"17 python3 1.0 GiB", pid + " " + filepath.Base(os.Args[0]) + " 500 MiB 40 MiB 32 MiB 20 MiB", "18 [Not Found] ?"}, lines)

	out.Reset()
	require.Equal(t, exitOK, run([]string{"top", "-json"}, &out, &complaints, h))
	var all []process
	require.NoError(t, json.Unmarshal(out.Bytes(), &all))
	require.Len(t, all, 3)
	both := 1025 << 20
	require.Equal(t, process{PID: 17, Name: "python3", Bytes: &both}, all[0])
	require.True(t, all[1].Offers)
	require.Len(t, all[1].Map.Pools, 1)

	h.command = smi("", errors.New("exit status 9"))
	out.Reset()
	require.Equal(t, exitOK, run([]string{"top"}, &out, &complaints, h))
	require.Contains(t, out.String(), "processes that offer no map are not listed: nvidia-smi: exit status 9\n")
}

func TestDoctorNamesWhoSuspended(t *testing.T) {
	_, buffer := program(t)
	h := show(t, healthy())
	require.Empty(t, suspended(h))
	s, err := vmm.Suspend(t.Context(), vmm.SuspendOptions{}, buffer)
	require.NoError(t, err)
	all := suspended(h)
	require.Len(t, all, 1)
	require.Equal(t, fmt.Sprintf("process %d (%s) has suspended 6 MiB, of which host memory keeps 6 MiB", os.Getpid(), filepath.Base(os.Args[0])), all[0].Seen)
	out, _ := cuvmm(t, exitOK, "doctor", "-driver", "sim")
	require.Contains(t, out, all[0].Seen)
	require.NoError(t, s.Resume(t.Context()))
	require.Empty(t, suspended(h))
}

func TestTopWithNothing(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	var out, complaints bytes.Buffer
	h := thisHost()
	h.command = smi("No running processes found\n", nil)
	require.Equal(t, exitOK, run([]string{"top"}, &out, &complaints, h))
	require.Contains(t, out.String(), "no process is seen that uses a GPU\n")
}

// A process that stands still does not hold up the others.
func TestTopOfAProcessThatStandsStill(t *testing.T) {
	dir, err := os.MkdirTemp("", "top") //nolint:usetesting // which makes longer paths than a socket's may be
	require.NoError(t, err)
	defer os.RemoveAll(dir)
	t.Setenv("XDG_RUNTIME_DIR", dir)
	require.NoError(t, os.Mkdir(filepath.Join(dir, "cuvmm"), 0o700))
	l, err := net.Listen("unix", filepath.Join(dir, "cuvmm", "4711-1.sock"))
	require.NoError(t, err)
	defer l.Close()
	h := thisHost()
	h.command = smi("4711, x, 500\n", nil)
	var out, complaints bytes.Buffer
	require.Equal(t, exitOK, run([]string{"top"}, &out, &complaints, h))
	require.Regexp(t, `4711 .* 500 MiB\n +does not show its map: it did not reply within 3s`, out.String())
}

func TestWhatProcessesShare(t *testing.T) {
	var out bytes.Buffer
	writeProcesses(&out, []process{{PID: 5, Name: "server", Offers: true, Map: &inspect.Snapshot{
		Publications: []inspect.Publication{{Name: "cache", Suspended: true}, {Name: "weights", Bytes: 1 << 20, Pinned: 5 << 20, Followers: []inspect.Reader{
			{PID: 6, Bytes: 6 << 20, Pinned: 5 << 20, Since: time.Now()}, {PID: 7, Refused: "no memory"}}}},
		Followers: []inspect.Follower{{Name: "index", PID: 8, Bytes: 2 << 20, Stuck: "the publisher is gone"}, {Name: "layers", PID: 9, Suspended: true}},
		Leases:    []inspect.Lease{{Bytes: 1}},
		Totals:    cuda.Stats{Suspended: 3, SuspendedBytes: 40 << 30, KeptBytes: 30 << 30, IdleHostBytes: 2 << 30},
		Budgets: []inspect.Budget{{Serial: 1, Name: "gpu", Limit: 60 << 30, Committed: 4 << 30, Peak: 50 << 30},
			{Serial: 3, Parent: 1, Committed: 2 << 30, Peak: 2 << 30}},
	}}}, "")
	for _, want := range []string{
		"publishes \"weights\": 1 MiB, 2 followers, 5 MiB pinned\n",
		"publishes \"cache\": 0 B, 0 followers, 0 B pinned; sleeps\n",
		"follows \"layers\" of process 9: 0 B; sleeps\n",
		"process 6 has 6 MiB, and keeps 5 MiB pinned\n",
		"process 7 has 0 B; refused the last generation: no memory\n",
		`follows "index" of process 8: 2 MiB; stuck: the publisher is gone`,
		"1 leases are open",
		"sleeps: 40 GiB of memory are suspended, of which host memory keeps 30 GiB\n",
		"retains 2 GiB of pinned host memory that nothing uses\n",
		"budget \"gpu\": 4 GiB of 60 GiB, at most 50 GiB so far\n",
		"budget 3: 2 GiB without a limit, at most 2 GiB so far, within \"gpu\"\n",
	} {
		require.Contains(t, out.String(), want)
	}
}
