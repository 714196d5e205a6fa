//go:build linux

package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The sample runs itself again as its publisher and its followers, which in a
// test is the test.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "-driver" {
		main()
		return
	}
	os.Exit(m.Run())
}

func TestSamplePublishesAndFollows(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), []string{"-driver", "sim"}, &out))
	said := out.String()
	require.Equal(t, 3, strings.Count(said, "software driver"), said)
	require.Equal(t, 2, strings.Count(said, ": withdrawn"), said)
	require.Contains(t, said, "generation 12: ")
	require.Contains(t, said, "every element as it should be")
}

func TestSampleListsAndEndsWhenItIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o700))
	var out locked
	var said bytes.Buffer
	out.out = &said
	over := make(chan error, 2)
	args := []string{"-driver", "sim", "-dir", dir, "-every", "1ms", "-most", "600000"}
	until := func(there func() bool) {
		t.Helper()
		require.Eventually(t, func() bool { return len(over) > 0 || there() }, 30*time.Second, time.Millisecond)
		select {
		case err := <-over:
			t.Fatal("it has ended: ", err)
		default:
		}
	}
	go func() { over <- run(ctx, append(args, "-followers", "1", "publish"), &out) }()
	until(func() bool { _, err := os.Lstat(dir + "/server"); return err == nil })
	go func() { over <- run(ctx, append(args, "follow"), &out) }()
	until(func() bool { return strings.Contains(out.text(), "every element as it should be") })
	var listed bytes.Buffer
	require.NoError(t, run(ctx, append(args, "list"), &listed))
	require.Contains(t, listed.String(), "numbers ")
	require.Contains(t, listed.String(), ", of uint64")
	cancel()
	require.NoError(t, <-over)
	require.NoError(t, <-over)
}

func (l *locked) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.out.(*bytes.Buffer).String()
}

// A publisher that cannot begin ends the whole, and says why.
func TestSampleEndsWhenThePublisherFails(t *testing.T) {
	var out bytes.Buffer
	err := run(t.Context(), []string{"-driver", "sim", "-name", "\xff"}, &out)
	require.ErrorContains(t, err, "exit status 1")
	require.Contains(t, out.String(), "bytes of UTF-8")
}

// An interrupt ends the publisher and the followers in order, and is no failure.
func TestSampleEndsWhenItIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var out locked
	out.out = new(bytes.Buffer)
	over := make(chan error, 1)
	go func() { over <- run(ctx, []string{"-driver", "sim"}, &out) }()
	require.Eventually(t, func() bool { return strings.Contains(out.text(), "every element as it should be") }, time.Minute, time.Millisecond)
	cancel()
	require.NoError(t, <-over)
	require.NotContains(t, out.text(), "11-ipc-server:", "a process that ended in error says so")
}

func TestSampleHelpsWithoutFailing(t *testing.T) {
	said, err := exec.CommandContext(t.Context(), os.Args[0], "-driver", "sim", "-h").CombinedOutput()
	require.NoError(t, err)
	require.Contains(t, string(said), usage)
}

func TestSampleRefusesBadInput(t *testing.T) {
	for _, row := range []struct {
		args []string
		says string
	}{
		{[]string{"-driver", "gpu", "publish"}, `use "auto", "real" or "sim"`},
		{[]string{"-step", "0", "publish"}, "-step must be positive"},
		{[]string{"-most", "1", "publish"}, "-step must be positive"},
		{[]string{"-step", "0"}, "-step must be positive"},
		{[]string{"-most", "9999999999"}, "at most 4294967296"},
		{[]string{"publish", "-name", "x"}, "flags come first"},
		{[]string{"watch"}, `command "watch"`},
		{[]string{"-driver", "sim", "-dir", t.TempDir() + "/absent", "follow"}, "no such file"},
	} {
		require.ErrorContains(t, run(t.Context(), row.args, new(bytes.Buffer)), row.says)
	}
}

// What cannot be written is an error.
func TestSampleNoticesThatNobodyReadsIt(t *testing.T) {
	out, err := os.Open(os.DevNull) // for reading alone
	require.NoError(t, err)
	defer out.Close()
	require.ErrorContains(t, run(t.Context(), []string{"-driver", "sim"}, out), "write "+os.DevNull)
}
