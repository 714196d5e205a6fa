//go:build linux

package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/cuvmm/cuvmm/internal/test/testlog"
	"github.com/cuvmm/cuvmm/samples/internal/app"
)

// The sample runs itself again as its publisher and its followers, which in a
// test is the test.
func TestMain(m *testing.M) {
	if app.Started() {
		main()
		return
	}
	os.Exit(m.Run())
}

func TestSamplePublishesAndFollows(t *testing.T) {
	var out testlog.Log
	require.NoError(t, sample.Test(t.Context(), nil, []string{"-driver", "sim"}, nil, &out))
	said := out.String()
	require.Equal(t, 2, strings.Count(said, ": withdrawn"), said)
	require.Contains(t, said, "generation 12: ")
	require.Contains(t, said, "every element as it should be")
}

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

// A publisher that cannot begin ends the program, and says why.
func TestSampleEndsWhenThePublisherFails(t *testing.T) {
	var out testlog.Log
	err := sample.Test(t.Context(), nil, []string{"-driver", "sim", "-name", "\xff"}, nil, &out)
	require.ErrorContains(t, err, "exit status 1")
	require.Contains(t, out.String(), "bytes of UTF-8")
}

// An interrupt ends the publisher and the followers in order, and is no failure.
func TestSampleEndsWhenItIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var out testlog.Log
	over := make(chan error, 1)
	go func() { over <- sample.Test(ctx, nil, []string{"-driver", "sim"}, nil, &out) }()
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "every element as it should be") }, time.Minute, time.Millisecond)
	cancel()
	require.NoError(t, <-over)
	require.NotContains(t, out.String(), "11-ipc-server:", "a process that ended in error says so")
}

func TestSampleRefusesBadInput(t *testing.T) {
	for _, row := range []struct {
		args []string
		says string
	}{
		{[]string{"-step", "0", "publish"}, "-step must be positive"},
		{[]string{"-most", "1", "publish"}, "-step 262144 -most 1 "},
		{[]string{"-step", "0"}, "-step must be positive"},
		{[]string{"-most", "9999999999"}, "at most 4294967296"},
		{[]string{"publish", "-name", "x"}, "flags come first"},
		{[]string{"watch"}, `command "watch"`},
		{[]string{"-driver", "sim", "-dir", t.TempDir() + "/absent", "follow"}, "no such file"},
	} {
		require.ErrorContains(t, sample.Test(t.Context(), nil, row.args, nil, io.Discard), row.says)
	}
}

// What cannot be written is an error, also what a follower writes.
func TestSampleNoticesFailedWrites(t *testing.T) {
	out, err := os.Open(os.DevNull) // for reading alone
	require.NoError(t, err)
	defer out.Close()
	require.ErrorContains(t, sample.Test(t.Context(), nil, []string{"-driver", "sim"}, nil, out), "write "+os.DevNull)
}
