//go:build linux

package main

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/internal/test/sampletest"
	"github.com/cuvmm/cuvmm/internal/test/testlog"
)

func TestMain(m *testing.M)   { sampletest.Main(m, main) }
func TestSample(t *testing.T) { sampletest.Test(t, sample.Name, sample.Test) }

func TestSampleListsAndEndsWhenItIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o700))
	var out testlog.Log
	over := make(chan error, 2)
	args := []string{"-driver", "sim", "-dir", dir, "-every", "1ms", "-most", "600000"}
	until := func(there func() bool) {
		t.Helper()
		require.Eventually(t, func() bool { return len(over) > 0 || there() }, time.Minute, time.Millisecond)
		select {
		case err := <-over:
			t.Fatal("it has ended: ", err)
		default:
		}
	}
	go func() { over <- sample.Test(ctx, nil, append(args, "-followers", "1", "publish"), nil, &out) }()
	until(func() bool { _, err := os.Lstat(dir + "/server"); return err == nil })
	go func() { over <- sample.Test(ctx, nil, append(args, "follow"), nil, &out) }()
	until(func() bool { return strings.Contains(out.String(), "every element as it should be") })
	var listed bytes.Buffer
	require.NoError(t, sample.Test(ctx, nil, append(args, "list"), nil, &listed))
	require.Contains(t, listed.String(), `published  "numbers": length `)
	require.Contains(t, listed.String(), ", of uint64")
	cancel()
	require.NoError(t, <-over)
	require.NoError(t, <-over)
}
