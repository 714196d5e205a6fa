//go:build linux

package keeper_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/sealedfile"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// role has the test binary run as another process.
const role = "CUVMM_TEST_ROLE"

func TestMain(m *testing.M) {
	if f := roles[os.Getenv(role)]; f != nil {
		if err := f(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

var roles = map[string]func() error{"counts": counts, "replaced": replaced, "replaces": replaces}

// as returns the command of this binary in a role.
func as(name string, arguments ...string) *exec.Cmd {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	c := exec.Command(self, arguments...)
	c.Env = append(os.Environ(), role+"="+name)
	return c
}

func file(t require.TestingT, contents string) *peer.FD {
	n, err := sealedfile.New("test", []byte(contents))
	require.NoError(t, err)
	f, err := peer.NewFD(n)
	require.NoError(t, err)
	return f
}

func files(t require.TestingT, from, n int) (all []*peer.FD) {
	for i := range n {
		all = append(all, file(t, strconv.Itoa(from+i)))
	}
	return all
}

func contents(t require.TestingT, all []*peer.FD) (texts []string) {
	for _, f := range all {
		require.NoError(t, f.Use(func(n int) error {
			text, err := sealedfile.Read(n, 1<<20)
			texts = append(texts, string(text))
			return err
		}))
	}
	return texts
}

// serving returns a client of a keeper, whose connection ends with the test.
func serving(t *testing.T, k *keeper.Keeper) (*keeper.Client, *peer.Conn) {
	near, far := peertest.Pair(t, peer.Options{MaxFDs: 4096})
	done := make(chan error, 1)
	go func() { done <- k.Serve(context.Background(), far) }()
	t.Cleanup(func() {
		require.NoError(t, near.Close())
		require.NoError(t, <-done)
	})
	return keeper.NewClient(near), near
}

func TestWhatIsWrittenIsKeptAcrossConnections(t *testing.T) {
	peertest.NoLeak(t)
	k := keeper.New()
	defer func() { require.NoError(t, k.Close()) }()
	a, b := keeper.Key{1}, keeper.Key{2}
	t.Run("written", func(t *testing.T) {
		c, _ := serving(t, k)
		ctx := peertest.Context(t)
		many, one := files(t, 0, 150), files(t, 500, 1)
		require.NoError(t, c.Write(ctx, keeper.Entry{Key: b, Record: []byte("b")}))
		require.NoError(t, c.Write(ctx, keeper.Entry{Key: a, Record: []byte("old"), Files: many}))
		require.NoError(t, c.Write(ctx, keeper.Entry{Key: a, Record: []byte("new"), Files: one}), "replaces the record, and adds files")
		require.NoError(t, peer.CloseAll(append(many, one...)))
		require.Equal(t, 2, k.Len())
	})
	for range 2 {
		t.Run("there", func(t *testing.T) {
			c, _ := serving(t, k)
			all, err := c.All(peertest.Context(t))
			require.NoError(t, err)
			require.Len(t, all, 2)
			require.Equal(t, a, all[0].Key)
			require.Equal(t, "new", string(all[0].Record))
			got := contents(t, all[0].Files)
			require.Len(t, got, 151)
			require.Equal(t, []string{"0", "149", "500"}, []string{got[0], got[149], got[150]})
			require.Equal(t, keeper.Entry{Key: b, Record: []byte("b")}, all[1])
			require.NoError(t, all[0].Close())
		})
	}
	t.Run("dropped", func(t *testing.T) {
		c, _ := serving(t, k)
		ctx := peertest.Context(t)
		before := peer.OpenFDs()
		require.NoError(t, c.Drop(ctx, a))
		require.Equal(t, before-151, peer.OpenFDs())
		require.NoError(t, c.Drop(ctx, a), "twice is no error")
		all, err := c.All(ctx)
		require.NoError(t, err)
		require.Len(t, all, 1)
	})
}

// What is too much, and what a keeper's client must not send.
func TestAKeeperBoundsWhatItIsSent(t *testing.T) {
	peertest.NoLeak(t)
	k := keeper.New()
	c, _ := serving(t, k)
	require.ErrorIs(t, c.Write(peertest.Context(t), keeper.Entry{Record: make([]byte, keeper.MaxRecord+1)}), cuda.ErrInvalidArgument)
	key := keeper.Key{7}
	for name, messages := range map[string]func() []peer.Message{
		"an unknown kind":       func() []peer.Message { return []peer.Message{{Kind: 7}} },
		"half a key":            func() []peer.Message { return []peer.Message{{Kind: wire.KeepDrop, Body: key[:7]}} },
		"a key with a file":     func() []peer.Message { return []peer.Message{{Kind: wire.KeepDrop, Body: key[:], FDs: files(t, 0, 1)}} },
		"a short entry":         func() []peer.Message { return []peer.Message{{Kind: wire.KeepWrite, Body: key[:]}} },
		"too many files":        func() []peer.Message { return []peer.Message{entry(key, keeper.MaxFiles+1)} },
		"more files than said":  func() []peer.Message { m := entry(key, 1); m.FDs = files(t, 0, 2); return []peer.Message{m} },
		"no files":              func() []peer.Message { return []peer.Message{entry(key, 1), {Kind: wire.KeepFiles}} },
		"another request":       func() []peer.Message { return []peer.Message{entry(key, 1), {Kind: wire.KeepAll}} },
		"files without a start": func() []peer.Message { return []peer.Message{{Kind: wire.KeepFiles, FDs: files(t, 0, 1)}} },
	} {
		t.Run(name, func(t *testing.T) {
			near, far := peertest.Pair(t, peer.Options{MaxFDs: 4096})
			for _, m := range messages() {
				require.NoError(t, near.Send(peertest.Context(t), m))
				require.NoError(t, m.Close())
			}
			k := keeper.New()
			require.ErrorIs(t, k.Serve(peertest.Context(t), far), peer.ErrProtocol)
			require.Zero(t, k.Len())
		})
	}
}

func entry(key keeper.Key, files int) peer.Message {
	e := wire.Encoder{}
	e.Raw(key[:])
	e.Uint32(uint32(files))
	e.Blob(nil)
	return peer.Message{Kind: wire.KeepWrite, Body: e.B}
}

// An entry whose writer dies before it has sent all files is not kept.
func TestHalfAnEntryIsNotKept(t *testing.T) {
	peertest.NoLeak(t)
	k := keeper.New()
	near, far := peertest.Pair(t, peer.Options{})
	m := entry(keeper.Key{1}, 100)
	m.FDs = files(t, 0, 60)
	require.NoError(t, near.Send(peertest.Context(t), m))
	require.NoError(t, m.Close())
	require.NoError(t, near.Close())
	require.NoError(t, k.Serve(peertest.Context(t), far))
	require.Zero(t, k.Len())
}

// counts is a process that a keeper runs: it adds an entry, says how many there are, and dies, or
// with the last waits to be told to end.
func counts() error {
	c, err := peer.Inherit(os.NewFile(3, "keeper"), peer.Options{})
	if err != nil {
		return err
	}
	ending := make(chan os.Signal, 1)
	signal.Notify(ending, syscall.SIGTERM)
	ctx := context.Background()
	k := keeper.NewClient(c)
	all, err := k.All(ctx)
	if err != nil {
		return err
	}
	e := keeper.Entry{Files: files(panics{}, len(all), 1)}
	binary.LittleEndian.PutUint64(e.Key[:], uint64(len(all)))
	if err := k.Write(ctx, e); err != nil {
		return err
	}
	if _, err := os.NewFile(4, "told").Write([]byte{byte(len(all))}); err != nil {
		return err
	}
	if len(all) < 5 {
		return syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	<-ending
	return nil
}

type panics struct{}

func (panics) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (panics) FailNow()                          { panic("failed") }

func TestAProcessThatDiesFindsWhatItsPredecessorWrote(t *testing.T) {
	peertest.NoLeak(t)
	k := keeper.New()
	defer func() { require.NoError(t, k.Close()) }()
	told, theirs, err := os.Pipe()
	require.NoError(t, err)
	defer told.Close()
	defer theirs.Close()
	restart := make(chan os.Signal)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- k.Run(ctx, keeper.RunOptions{Restart: restart, Command: func() *exec.Cmd {
			c := as("counts")
			c.ExtraFiles = []*os.File{theirs}
			return c
		}})
	}()
	next := func() byte {
		require.NoError(t, told.SetReadDeadline(time.Now().Add(peertest.Guard)))
		var b [1]byte
		_, err := told.Read(b[:])
		require.NoError(t, err)
		return b[0]
	}
	for i := range 6 {
		require.EqualValues(t, i, next(), "the sixth lives")
	}
	restart <- syscall.SIGHUP
	require.EqualValues(t, 6, next(), "and is replaced when asked")
	stop()
	require.NoError(t, <-done)
	require.Equal(t, 7, k.Len())
	require.ErrorIs(t, k.Run(t.Context(), keeper.RunOptions{}), cuda.ErrInvalidArgument)
}

// A keeper that has something, such as one that replaced another, does not let go of it because a process does not begin.
func TestAKeeperWithEntriesStartsAgain(t *testing.T) {
	peertest.NoLeak(t)
	k := keeper.New()
	near, far := peertest.Pair(t, peer.Options{})
	served := make(chan error, 1)
	go func() { served <- k.Serve(t.Context(), far) }()
	require.NoError(t, keeper.NewClient(near).Write(t.Context(), keeper.Entry{Key: keeper.Key{1}}))
	require.NoError(t, near.Close())
	require.NoError(t, <-served)
	require.NoError(t, far.Close())
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	started := 0
	require.NoError(t, k.Run(ctx, keeper.RunOptions{Command: func() *exec.Cmd {
		if started++; started == 3 {
			stop()
		}
		return exec.Command("false")
	}}))
	require.Equal(t, 3, started)
	require.Equal(t, 1, k.Len())
	require.NoError(t, k.Close())
}

// replaced is a keeper with entries that replaces itself by another program.
func replaced() error {
	k := keeper.New()
	near, far, err := peer.Pair(peer.Options{})
	if err != nil {
		return err
	}
	c, err := peer.Inherit(far, peer.Options{})
	if err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() { served <- k.Serve(context.Background(), near) }()
	client := keeper.NewClient(c)
	for i := range 3 {
		e := keeper.Entry{Key: keeper.Key{byte(i)}, Record: []byte{byte(i)}, Files: files(panics{}, 10*i, 70)}
		if err := client.Write(context.Background(), e); err != nil {
			return err
		}
		if err := e.Close(); err != nil {
			return err
		}
	}
	if err := c.Close(); err != nil {
		return err
	}
	if err := <-served; err != nil {
		return err
	}
	extra, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	if err := k.Exec("/nonexistent", nil, nil, extra); err == nil || k.Len() != 3 {
		return fmt.Errorf("a program that is not there: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return k.Exec(self, []string{self, strconv.Itoa(os.Getpid()), strconv.Itoa(int(extra.Fd()))}, []string{role + "=replaces"}, extra)
}

// replaces is that other program.
func replaces() error {
	k, err := keeper.Inherit()
	if err != nil || k == nil || k.Len() != 3 {
		return fmt.Errorf("inherited %v: %w", k, err)
	}
	if os.Args[1] != strconv.Itoa(os.Getpid()) {
		return fmt.Errorf("process %d, was %s", os.Getpid(), os.Args[1])
	}
	n, err := strconv.Atoi(os.Args[2])
	if err != nil {
		return err
	}
	if _, err := os.NewFile(uintptr(n), "extra").Stat(); err != nil {
		return err
	}
	near, far, err := peer.Pair(peer.Options{})
	if err != nil {
		return err
	}
	c, err := peer.Inherit(far, peer.Options{})
	if err != nil {
		return err
	}
	go func() { _ = k.Serve(context.Background(), near) }()
	all, err := keeper.NewClient(c).All(context.Background())
	if err != nil {
		return err
	}
	for i, e := range all {
		if got := contents(panics{}, e.Files); len(got) != 70 || got[69] != strconv.Itoa(10*i+69) || e.Record[0] != byte(i) || e.Key[0] != byte(i) {
			return fmt.Errorf("entry %d: %v with %v", i, e, got)
		}
	}
	if again, err := keeper.Inherit(); again != nil || err != nil {
		return fmt.Errorf("inherited twice: %w", err)
	}
	return nil
}

func TestAKeeperIsReplacedByAnotherProgram(t *testing.T) {
	out, err := as("replaced").CombinedOutput()
	require.NoError(t, err, "%s", out)
}
