package main

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/page"
	"github.com/cuvmm/cuvmm/inspect/profile"
	"github.com/cuvmm/cuvmm/inspect/torch"
	"github.com/stretchr/testify/require"
)

const hostile = "x\x1b]0;owned\a\x1b[2J\x9b31m\u009b1m\u202e"

// drawn returns what a terminal without colors gets of snapshots.
func drawn(t testing.TB, all ...inspect.Snapshot) string {
	var out bytes.Buffer
	require.NoError(t, (&mapFlags{width: 40, rows: 10}).show(all, &out, host{env: none}))
	return out.String()
}

// controlled reports what in the text would control a terminal.
func controlled(text string) string {
	return strings.Join(strings.FieldsFunc(text, func(r rune) bool {
		return r != '\u202e' && r != '\ufffd' && (r >= ' ' && r < 0x7f || r > 0x9f || r == '\n' || r == '\t')
	}), "")
}

// everywhere returns a snapshot with a text wherever it has one.
func everywhere(text string) inspect.Snapshot {
	return inspect.Snapshot{
		Format: inspect.Format, Version: inspect.Version, Process: inspect.Process{Name: text, Host: text}, Driver: text,
		Devices:      []inspect.Device{{Name: text, UUID: text}},
		Reservations: []inspect.Reservation{{Ptr: 1 << 30, Bytes: 1 << 22, Mappings: []inspect.Mapping{{Bytes: 1 << 21, Memory: 1, Access: text}}}},
		Memory:       []inspect.Memory{{ID: 1, Bytes: 1 << 21, Location: text, Mappings: 1, Stack: 1}},
		Buffers:      []inspect.Buffer{{Ptr: 1 << 30, Used: 5, Committed: 1 << 21, Reserved: 1 << 22, Stack: 1}},
		Pools: []inspect.Pool{{Tags: []inspect.Use{{Name: text, Bytes: 1}}, Segments: []inspect.Segment{{Ptr: 1 << 31, Bytes: 1 << 21, Kind: text,
			Blocks: []inspect.Block{{Bytes: 512, Tag: text, Stack: 1}}}}, History: []inspect.Event{{Op: text, Tag: text}}}},
		Others:       []inspect.Other{{Kind: text, Bytes: 5}},
		Publications: []inspect.Publication{{Name: text, Followers: []inspect.Reader{{Refused: text}}}},
		Followers:    []inspect.Follower{{Name: text, Stuck: text}},
		Stacks:       []inspect.Stack{{text, "main.load (" + text + ":3)"}},
	}
}

// What other processes, drivers and peers call things reaches no terminal as it is.
func TestStrangersTextControlsNoTerminal(t *testing.T) {
	s := everywhere(hostile)
	before := s
	before.Buffers = nil
	for name, text := range map[string]string{"a map": drawn(t, s), "a comparison": drawn(t, before, s)} {
		require.Contains(t, text, `x\x1b]0;owned\a\x1b[2J\x9b31m\u009b1m\u202e`, name)
		require.Empty(t, controlled(text), name)
	}
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	for name, c := range map[string]struct {
		args    []string
		command func(string, ...string) (string, error)
	}{
		"nvidia-smi's processes": {[]string{"top"}, smi("4711, /opt/eve/"+hostile+", 100\n", nil)},
		"nvidia-smi's error":     {[]string{"top"}, smi("", errors.New(hostile))},
		"an argument":            {[]string{"map", hostile}, smi("", nil)},
		"a driver":               {[]string{"info", "-driver", hostile}, smi("", nil)},
	} {
		var out, complaints bytes.Buffer
		h := thisHost()
		h.env, h.command = none, c.command
		run(c.args, &out, &complaints, h)
		require.Contains(t, out.String()+complaints.String(), "owned", name)
		require.Empty(t, controlled(out.String()+complaints.String()), name)
	}
	var out bytes.Buffer
	writeFindings(&out, []finding{{Check: hostile, Seen: hostile, Means: hostile, Remedy: hostile, Commands: []string{"true"}}})
	writeCommands(&out, []finding{{Check: hostile, Seen: hostile, Commands: []string{"true"}}})
	writeProcesses(plain{&out}, []process{{Name: hostile, Map: &s}, {Error: hostile}}, hostile)
	require.Empty(t, controlled(out.String()))
}

// A page of another host, whose name leads here, does not read the map.
func TestTheHostOfAPage(t *testing.T) {
	for _, c := range []struct {
		address, host string
		served        bool
	}{
		{"localhost:0", "localhost:8080", true}, {"localhost:0", "127.0.0.1:8080", true}, {"localhost:0", "[::1]:8080", true},
		{"localhost:0", "[::1]", true}, {"localhost:0", "LocalHost", true}, {":8080", "10.0.0.7:8080", true}, {"node7:8080", "node7:8080", true},
		{"localhost:0", "evil.example:8080", false}, {"localhost:0", "localhost.evil.example", false}, {":8080", "", false}, {"localhost:0", "127.0.0.1.evil.example", false},
		{":8080", "node7:8080", false},
	} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodGet, "/snapshot", http.NoBody)
		r.Host = c.host
		forHost(c.address, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})).ServeHTTP(w, r)
		require.Equal(t, c.served, w.Code == http.StatusOK, "%q at %q", c.host, c.address)
		if !c.served {
			require.Equal(t, http.StatusMisdirectedRequest, w.Code)
			require.Contains(t, w.Body.String(), "start cuvmm map -http with that name")
		}
	}
}

// No snapshot file makes anything that reads it panic, or reach the terminal with more
// than text.
func FuzzSnapshot(f *testing.F) {
	for _, s := range []inspect.Snapshot{everywhere("text"), everywhere(hostile), {Format: inspect.Format, Version: inspect.Version}} {
		var text bytes.Buffer
		require.NoError(f, s.Write(&text))
		f.Add(text.Bytes())
	}
	const head = `{"format":"cuvmm snapshot","version":2,`
	f.Add([]byte(head + `"reservations":[{"ptr":"0x6f1c48200000","bytes":17179869184}],"pools":[{"segments":[{"ptr":"0x6f1c48300000","bytes":9223372036854775807,"blocks":[{"offset":9223372036854775797,"bytes":5}]}]}]}`))
	f.Add([]byte(head + `"buffers":[{"ptr":"0x1","used":1,"committed":1,"reserved":1,"device":1000000000,"stack":-1}],"stacks":[[]]}`))
	f.Add([]byte(head + `"pools":[{"device":-7,"history":[{"bytes":-1,"stack":9}]}],"memory":[{"bytes":-5,"stack":-3}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := inspect.Read(bytes.NewReader(text))
		if err != nil {
			return
		}
		require.Empty(t, controlled(drawn(t, s)))
		require.Empty(t, controlled(drawn(t, s, s)))
		_ = torch.Write(io.Discard, s)
		_ = profile.Write(io.Discard, s)
		_ = page.Write(io.Discard, s)
		var out bytes.Buffer
		writeProcesses(plain{&out}, []process{{Map: &s}}, "")
		require.Empty(t, controlled(out.String()))
	})
}
