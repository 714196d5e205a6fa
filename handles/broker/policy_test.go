//go:build linux

package broker_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
)

func ExamplePolicy() {
	p, err := broker.ParsePolicy([]byte(`{"rules": [
		{"users": ["1000"], "access": "write", "limit": {"MiB": 40960}},
		{"users": ["*"], "names": ["public/*"], "access": "read"}
	]}`))
	must(err)
	show := func(uid uint32, name string) {
		var g broker.Grant = p.Authorize(broker.Caller{Credentials: peer.Credentials{UID: uid}, Known: true}, name)
		var q broker.Quota = g.Quota
		fmt.Println(uid, name, g.Access, q.Bytes>>30, "GiB")
	}
	show(1000, "model")
	show(1001, "model")
	show(1001, "public/model")
	// Output:
	// 1000 model write 40 GiB
	// 1001 model none 0 GiB
	// 1001 public/model read 0 GiB
}

func TestAPolicyDecides(t *testing.T) {
	root, err := user.LookupId("0")
	require.NoError(t, err)
	p, err := broker.ParsePolicy([]byte(`{"rules": [
		{"users": ["7"], "names": ["secret*"], "access": "none"},
		{"users": ["` + root.Username + `"], "access": "write"},
		{"groups": ["50"], "names": ["a*/*z", "b"], "access": "write", "ephemeral": true, "limit": {"MiB": 3, "objects": 4, "descriptors": 5}},
		{"users": ["*", "8"], "groups": ["51"], "names": ["*o*a*", "secret"], "access": "read"}
	]}`))
	require.NoError(t, err)
	for _, c := range []struct {
		uid    uint32
		groups []uint32
		name   string
		want   publish.Access
	}{
		{0, nil, "secret", publish.WriteAccess},
		{7, nil, "secret", publish.NoAccess},
		{8, nil, "secret", publish.ReadAccess},
		{8, nil, "secrets", publish.NoAccess},
		{8, nil, "fooba", publish.ReadAccess},
		{8, nil, "foob", publish.NoAccess},
		{8, []uint32{1, 50}, "b", publish.WriteAccess},
		{8, []uint32{1, 50}, "bb", publish.NoAccess},
		{8, []uint32{50}, "ab/c/z", publish.WriteAccess},
		{8, []uint32{50}, "a/", publish.NoAccess},
		{8, []uint32{50}, "z", publish.NoAccess},
		{65534, []uint32{50}, "secret", publish.NoAccess}, // it may be anyone
		{8, []uint32{65534}, "b", publish.NoAccess},
	} {
		g := p.Authorize(broker.Caller{Credentials: peer.Credentials{UID: c.uid}, Groups: c.groups, Known: true}, c.name)
		require.Equal(t, c.want, g.Access, c)
		require.Equal(t, broker.Grant{}, p.Authorize(broker.Caller{Credentials: peer.Credentials{UID: c.uid}, Groups: c.groups}, c.name), "it is not known")
		require.Equal(t, c.want == publish.WriteAccess && c.uid != 0, g.EphemeralOnly)
		if g.EphemeralOnly {
			require.Equal(t, []int{3 << 20, 4, 5}, []int{g.Quota.Bytes, g.Quota.Objects, g.Quota.Descriptors})
			require.True(t, g.Quota.Counts("b") && g.Quota.Counts("a/z"))
			require.False(t, g.Quota.Counts("secret"), "objects of other rules do not count")
		}
	}
	require.Equal(t, broker.Grant{}, (*broker.Policy)(nil).Authorize(broker.Caller{Known: true}, "x"))
}

func TestPoliciesThatAreRefused(t *testing.T) {
	for text, says := range map[string]string{
		``:                 "write {",
		`[]`:               "write {",
		`{"rules": []} {}`: "more behind it",
		`{}`:               "a policy without rules",
		`{"rules": []}`:    "a policy without rules",
		`{"rules": [{"users": ["*"], "access": "write", "Copy": true}]}`:                    `the key "Copy", which is written "copy"`,
		`{"rules": [{"users": ["*"], "access": "write", "limit": {"mib": 1}}]}`:             `the key "mib"`,
		`{"rules": [{"users": ["*"], "access": "read", "copy": true}]}`:                     `rule 1: access "read" with what bounds writing`,
		`{"rules": [{"users": ["*"], "access": "none", "limit": {"objects": 1}}]}`:          `rule 1: access "none" with what bounds writing`,
		`{"rules": [{"users": ["*"], "access": "write", "copy": true, "ephemeral": true}]}`: "rule 1: ephemeral objects that are copied",
		`{"rules": [], "Rules": []}`: `the key "Rules" comes twice`,
		`{"rules": [{"users": ["*"], "access": "none", "limit": {"MiB": 1}, "access": "write"}]}`: `the key "access" comes twice`,
		`{"rules": [{"user": ["1"]}]}`:                                                                          `unknown field "user"`,
		`{"rules": [{"users": ["1"]}]}`:                                                                         `rule 1: access ""`,
		`{"rules": [{"access": "read"}]}`:                                                                       "rule 1: neither users nor groups",
		`{"rules": [{"users": ["*"], "names": [], "access": "read"}]}`:                                          "rule 1: an empty list of names",
		`{"rules": [{"users": ["no-such-user"], "access": "read"}]}`:                                            "no-such-user",
		`{"rules": [{"users": ["4294967296"], "access": "read"}]}`:                                              "4294967296",
		`{"rules": [{"users": ["1"], "access": "read"}, {"groups": ["*"], "access": "read"}]}`:                  "rule 2: all groups",
		`{"rules": [{"users": ["1"], "access": "write", "limit": {"MiB": -1}}]}`:                                "a limit of -1 MiB",
		`{"rules": [{"users": ["1"], "access": "write", "limit": {"objects": 1, "MiB": 9223372036854775807}}]}`: "a limit of 9223372036854775807 MiB",
	} {
		_, err := broker.ParsePolicy([]byte(text))
		require.ErrorContains(t, err, says, text)
		require.ErrorContains(t, err, "broker.ParsePolicy")
	}
}

// strangerRole is a process of another user, in group 50: stranger FOLDER SOCKET.
func strangerRole(args []string) error {
	const uid, gid = 4242, 4243
	err := syscall.Setgroups([]int{50})
	if err == nil {
		err = syscall.Setresgid(gid, gid, gid)
	}
	if err == nil {
		err = syscall.Setresuid(uid, uid, uid)
	}
	if err != nil {
		return err
	}
	sys, err := open(args[0])
	if err != nil {
		return err
	}
	d, ctx := sys.Devices()[0], context.Background()
	_, err = broker.Dial(ctx, args[1], broker.DialOptions{Options: peer.Options{Allow: func(c peer.Credentials) error { return fmt.Errorf("user %d", c.UID) }}})
	if !errors.Is(err, peer.ErrPeer) {
		return fmt.Errorf("a broker of a user that it does not trust: %w", err)
	}
	k, err := broker.Dial(ctx, args[1], broker.DialOptions{})
	if err != nil {
		return err
	}
	all, err := k.List(ctx)
	if err != nil || len(all) != 1 || all[0].Name != "public" {
		return fmt.Errorf("listed %v: %w", all, err)
	}
	if _, err := k.Attach(ctx, d, "secret", broker.AttachOptions{}); !errors.Is(err, broker.ErrUnknown) {
		return fmt.Errorf("what it may not read: %w", err)
	}
	if _, err := k.Create(ctx, d, "public", broker.CreateOptions{Bytes: 1}); !errors.Is(err, cuda.ErrNotPermitted) {
		return fmt.Errorf("what it may not write: %w", err)
	}
	o, err := k.Attach(ctx, d, "public", broker.AttachOptions{})
	if err != nil {
		return err
	}
	if seed, err := check(o); err != nil || seed != 3 {
		return fmt.Errorf("object of seed %d: %w", seed, err)
	}
	w, err := k.Create(ctx, d, "ours", broker.CreateOptions{Bytes: len(contents(4)), Ephemeral: true})
	if err != nil {
		return err
	}
	if err := fill(w.Buffer(), contents(4)); err != nil {
		return err
	}
	ours, err := w.Commit(ctx, nil)
	if err != nil {
		return err
	}
	fmt.Println("written")
	_, _ = os.Stdin.Read(make([]byte, 1))
	return errors.Join(o.Close(), ours.Close(), k.Close(), sys.Close())
}

// A process of another user reaches the broker, and may do what the policy says.
func TestOtherUsers(t *testing.T) {
	peertest.NeedRoot(t)
	peertest.NoLeak(t)
	folder := t.TempDir()
	require.NoError(t, os.Chmod(filepath.Dir(folder), 0o711))
	require.NoError(t, os.Chown(folder, 0, 50))
	require.NoError(t, os.Chmod(folder, os.ModeSetgid|0o770))
	_, sys := sim.Open(t, machine(folder))
	d := sys.Devices()[0]
	p, err := broker.ParsePolicy([]byte(`{"rules": [
		{"users": ["0"], "access": "write"},
		{"groups": ["50"], "names": ["ours"], "access": "write", "ephemeral": true},
		{"users": ["*"], "names": ["public"], "access": "read"}
	]}`))
	require.NoError(t, err)
	h := newHouse(t, d, broker.Options{Authorize: p.Authorize}, peer.Options{Shared: true, Allow: func(peer.Credentials) error { return nil }})
	k := h.dial()
	for _, name := range []string{"secret", "public"} {
		w, err := k.Create(peertest.Context(t), d, name, broker.CreateOptions{Bytes: len(contents(3))})
		require.NoError(t, err)
		require.NoError(t, fill(w.Buffer(), contents(3)))
		o, err := w.Commit(peertest.Context(t), nil)
		require.NoError(t, err)
		closed(t, o)
	}
	c := as("stranger", folder, h.socket.Path())
	c.Stderr = os.Stderr
	in, err := c.StdinPipe()
	require.NoError(t, err)
	out, err := c.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.Start())
	said := make([]byte, 8)
	_, err = out.Read(said)
	require.NoError(t, err)
	require.Equal(t, "written\n", string(said))
	all, err := k.List(peertest.Context(t))
	require.NoError(t, err)
	require.Equal(t, "ours", all[0].Name)
	require.Equal(t, []peer.Credentials{{PID: c.Process.Pid, UID: 4242, GID: 4243}}, all[0].HeldBy)
	require.EqualValues(t, 4242, all[0].UID)
	require.NoError(t, in.Close())
	require.NoError(t, c.Wait())
	for _, name := range []string{"secret", "public"} {
		require.NoError(t, k.Remove(peertest.Context(t), name, 0))
	}
	_, _, err = d.MemoryInfo() // the software driver closes what others held until now
	require.NoError(t, err)
}
