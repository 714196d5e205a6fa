package page_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/inspect/page"
	"github.com/stretchr/testify/require"
)

func snapshot() inspect.Snapshot {
	return inspect.Snapshot{Format: inspect.Format, Version: inspect.Version,
		Process: inspect.Process{PID: 7, Name: "</script><script>alert(1)</script>"}}
}

func TestAPageNeedsNothingElse(t *testing.T) {
	var w bytes.Buffer
	require.NoError(t, page.Write(&w, snapshot()))
	text := w.String()
	for _, outside := range []string{"http:", "https:", "src=", "@import", "url(", "/*STYLE*/", "/*SCRIPT*/", "/*DATA*/"} {
		require.NotContains(t, text, outside)
	}
	require.Equal(t, 2, strings.Count(text, "</script>"), "no text of a snapshot ends an element")
	require.Contains(t, text, `"pid":7`)
}

func TestAPageShowsOneSnapshotOrTwo(t *testing.T) {
	var w bytes.Buffer
	require.NoError(t, page.Write(&w, snapshot(), snapshot()))
	require.ErrorContains(t, page.Write(&w), "0 snapshots: a page shows one, or compares two")
	require.ErrorContains(t, page.Write(&w, snapshot(), snapshot(), snapshot()), "3 snapshots")

	w.Reset()
	require.NoError(t, page.WriteLive(&w, "snapshot"))
	require.Contains(t, w.String(), `{"source":"snapshot"}`)
	require.ErrorContains(t, page.WriteLive(&w, ""), "no address")
}
