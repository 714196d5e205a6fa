//go:build linux

package publish

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/sock"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

// The file's form is that of docs/protocol.md, and nothing else is read.
func TestTheFormOfClaims(t *testing.T) {
	all := []claim{{identity{1, 15: 2}, 3, sock.ProcessID{PID: 4711, Namespace: 5, Start: 6}}}
	b := encodeClaims(all)
	require.Equal(t, "6375764f"+"0100"+"01000000"+"01000000000000000000000000000002"+"0300000000000000"+"67120000"+"0500000000000000"+"0600000000000000", hex.EncodeToString(b))
	got, err := decodeClaims(b)
	require.NoError(t, err)
	require.Equal(t, all, got)
	for name, bad := range map[string][]byte{
		"a byte missing": b[:len(b)-1], "a byte too many": append(b[:len(b):len(b)], 0), "no magic": b[1:], "magic alone": b[:4],
		"another version": append([]byte("cuvO\x02\x00"), b[6:]...), "too many": append([]byte("cuvO\x01\x00\xff\xff\xff\xff"), b[10:]...),
	} {
		_, err := decodeClaims(bad)
		require.Error(t, err, name)
	}
}

// A claim of a process that lives is respected, one of a process that ended is replaced and
// counted up, and an undo restores what was there.
func TestClaims(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o700))
	folder, err := sock.OpenDir(dir, 0)
	require.NoError(t, err)
	defer func() { require.NoError(t, folder.Close()) }()
	at, id, ctx := place{filepath.Join(dir, "s"), folder}, identity{7}, peertest.Context(t)
	self, err := sock.Self()
	require.NoError(t, err)
	read := func() (all []claim) {
		require.NoError(t, at.locked(ctx, "test", func(now []claim) ([]claim, error) { all = now; return nil, nil }))
		return all
	}
	write := func(all ...claim) {
		require.NoError(t, at.locked(ctx, "test", func([]claim) ([]claim, error) { return all, nil }))
	}
	gone, other := self, claim{identity{8}, 1, self}
	gone.Start++ // an earlier process of this pid
	write(claim{id, 4, gone}, other)
	taken, undo, err := at.take(ctx, "test", id)
	require.NoError(t, err)
	require.True(t, taken)
	require.ElementsMatch(t, []claim{{id, 5, self}, other}, read())
	undo()
	require.ElementsMatch(t, []claim{{id, 4, gone}, other}, read())

	process, end := exec(t)
	write(claim{id, 4, process})
	taken, _, err = at.take(ctx, "test", id)
	require.NoError(t, err)
	require.False(t, taken)
	end() // its parent, this process, has not collected it
	taken, _, err = at.take(ctx, "test", id)
	require.NoError(t, err)
	require.True(t, taken)
	foreign := self
	foreign.Namespace++
	write(claim{id, 4, foreign})
	_, _, err = at.take(ctx, "test", id)
	require.ErrorIs(t, err, cuda.ErrNotSupported)
	require.ErrorIs(t, at.awaitOwner(ctx, "test", id), cuda.ErrNotSupported)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "s.owners"), []byte("cuvX"), 0o600))
	_, _, err = at.take(ctx, "test", id)
	require.ErrorIs(t, err, peer.ErrProtocol)
	require.ErrorContains(t, err, "s.owners")
}

// The folder must be the one in which the client connected.
func TestAReplacedFolderIsNotTakenOver(t *testing.T) {
	o := newOrphans(t)
	o.endPublisher()
	dir := filepath.Dir(o.path)
	require.NoError(t, os.Rename(dir, dir+".old"))
	require.NoError(t, os.Mkdir(dir, 0o700))
	server := NewServer(ServerOptions{})
	_, err := TakeOver(peertest.Context(t), server, o.numbers, TakeOverOptions{})
	require.ErrorIs(t, err, peer.ErrPeer)
	require.NoError(t, server.Close())
}

// exec starts a process that lives until end. It is collected after the test.
func exec(t *testing.T) (id sock.ProcessID, end func()) {
	t.Helper()
	self, err := sock.Self()
	require.NoError(t, err)
	r, w, err := os.Pipe()
	require.NoError(t, err)
	p, err := os.StartProcess("/bin/cat", []string{"cat"}, &os.ProcAttr{Files: []*os.File{r, os.Stdout, os.Stderr}})
	require.NoError(t, err)
	require.NoError(t, r.Close())
	start, err := sock.Started(p.Pid)
	require.NoError(t, err)
	id = sock.ProcessID{PID: uint32(p.Pid), Namespace: self.Namespace, Start: start}
	process, err := id.Open()
	require.NoError(t, err)
	end = sync.OnceFunc(func() {
		require.NoError(t, w.Close())
		require.NoError(t, process.Wait(peertest.Context(t)))
		require.NoError(t, process.Close())
	})
	t.Cleanup(func() {
		end()
		_, err := p.Wait()
		require.NoError(t, err)
	})
	return id, end
}
