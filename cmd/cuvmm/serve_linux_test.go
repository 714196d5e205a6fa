package main

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/internal/link"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/testlog"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// served is cuvmm serve as another process, and a System on its software machine.
type served struct {
	*exec.Cmd
	sys  *cuda.System
	path string
	log  *testlog.Log
}

func serving(t *testing.T, folder string, args ...string) *served {
	self, err := os.Executable()
	require.NoError(t, err)
	return servingBy(t, self, folder, args...)
}

// servingBy is serving by another file with this program.
func servingBy(t *testing.T, program, folder string, args ...string) *served {
	s := &served{path: t.TempDir() + "/s/broker", log: &testlog.Log{}}
	s.Cmd = exec.Command(program, append([]string{"serve", "-socket", s.path, "-driver", "sim"}, args...)...)
	s.Env = append(os.Environ(), asChild+"=1", `CUVMM_SIM={"Folder": "`+folder+`"}`)
	s.Stderr = s.log
	require.NoError(t, s.Start())
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(s.log.String())
		}
		_ = s.Process.Kill()
	})
	m, err := sim.New(sim.Options{Folder: folder})
	require.NoError(t, err)
	s.sys, err = m.OpenOwned(cuda.Options{})
	require.NoError(t, err)
	return s
}

// end ends it, which frees what nobody has mapped.
func (s *served) end(t *testing.T) {
	require.NoError(t, s.Process.Signal(syscall.SIGTERM))
	require.NoError(t, s.Wait(), s.log.String())
	free, total, err := s.sys.Devices()[0].MemoryInfo()
	require.NoError(t, err)
	require.Less(t, total-free, 3<<20, "what nobody has mapped is free")
	require.NoError(t, s.sys.Close())
}

// An object outlives the broker's kill and replacement, and an upgrade of the keeper.
func TestServeKeepsWhatWasWritten(t *testing.T) {
	c := serving(t, t.TempDir(), "-limit", "64")
	d, path, log := c.sys.Devices()[0], c.path, c.log
	ctx := peertest.Context(t)
	k, err := broker.Dial(ctx, path, broker.DialOptions{Wait: true})
	require.NoError(t, err)
	w, err := k.Create(ctx, d, "w", broker.CreateOptions{Bytes: 3 << 20})
	require.NoError(t, err)
	part, err := w.Buffer().Slice(0, 5)
	require.NoError(t, err)
	require.NoError(t, part.CopyFrom(nil, []byte("bytes")))
	o, err := w.Commit(ctx, nil)
	require.NoError(t, err)
	require.NoError(t, o.Close())
	_, err = k.Create(ctx, d, "x", broker.CreateOptions{Bytes: 64 << 20})
	require.ErrorIs(t, err, broker.ErrLimit)

	started := func() int { return strings.Count(log.String(), "the broker was started") }
	for i, do := range []func() error{
		func() error { return syscall.Kill(childOf(t, c.Process.Pid), syscall.SIGKILL) },
		func() error { return c.Process.Signal(syscall.SIGHUP) },
		func() error { return c.Process.Signal(syscall.SIGUSR2) },
		func() error { return c.Process.Signal(syscall.SIGHUP) },
	} {
		before := started()
		require.NoError(t, do())
		require.Eventually(t, func() bool { return started() > before }, peertest.Guard, time.Millisecond, i)
		got, err := k.Attach(ctx, d, "w", broker.AttachOptions{})
		require.NoError(t, err)
		five := make([]byte, 5)
		part, err := got.Buffer().Slice(0, 5)
		require.NoError(t, err)
		require.NoError(t, part.CopyTo(nil, five))
		require.Equal(t, "bytes", string(five))
		require.NoError(t, got.Close())
	}
	require.NoError(t, k.Close())
	c.end(t)
}

// An upgrade by a program that cannot be started costs no object: the keeper goes on, and starts a broker once it can.
func TestServeOutlivesAnUpgradeThatFails(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	program := t.TempDir() + "/cuvmm"
	text, err := os.ReadFile(self)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(program, text, 0o700))
	c := servingBy(t, program, t.TempDir())
	ctx := peertest.Context(t)
	k, err := broker.Dial(ctx, c.path, broker.DialOptions{Wait: true})
	require.NoError(t, err)
	w, err := k.Create(ctx, c.sys.Devices()[0], "w", broker.CreateOptions{Bytes: 1})
	require.NoError(t, err)
	o, err := w.Commit(ctx, nil)
	require.NoError(t, err)
	require.NoError(t, os.Remove(program))
	require.NoError(t, c.Process.Signal(syscall.SIGUSR2))
	require.Eventually(t, func() bool { return strings.Contains(c.log.String(), "the keeper was not replaced") }, peertest.Guard, time.Millisecond)
	require.Contains(t, c.log.String(), "see that the program is there and can be executed")
	require.NoError(t, os.WriteFile(program, text, 0o700))
	_, err = k.List(ctx)
	require.NoError(t, err)
	require.NoError(t, o.Err())
	require.NoError(t, o.Close())
	require.NoError(t, k.Remove(ctx, "w", 0))
	require.NoError(t, c.Process.Signal(syscall.SIGUSR2))
	require.Eventually(t, func() bool { // a signal that comes too early for the next program does not end it
		require.NoError(t, c.Process.Signal(syscall.SIGHUP))
		return strings.Count(c.log.String(), "the broker was started") >= 3
	}, 20*time.Second, 100*time.Microsecond)
	require.NoError(t, k.Close())
	c.end(t)
}

// The broker of a keeper that is killed ends at once, and leaves its socket to the next.
func TestABrokerEndsWithItsKeeper(t *testing.T) {
	folder := t.TempDir()
	c := serving(t, folder)
	ctx := peertest.Context(t)
	k, err := broker.Dial(ctx, c.path, broker.DialOptions{Wait: true})
	require.NoError(t, err)
	require.NoError(t, k.Close())
	require.NoError(t, c.Process.Kill())
	_ = c.Wait()
	require.Eventually(t, func() bool {
		k, err := broker.Dial(ctx, c.path, broker.DialOptions{})
		return err != nil || k.Close() != nil
	}, peertest.Guard, time.Millisecond)
	require.NoError(t, c.sys.Close())
	next := serving(t, folder, "-socket", c.path)
	k, err = broker.Dial(ctx, c.path, broker.DialOptions{Wait: true})
	require.NoError(t, err)
	require.NoError(t, k.Close())
	next.end(t)
}

// Objects are saved from one broker and loaded into the next, and what a process wrote to them is found.
func TestObjectsAreSavedAndLoaded(t *testing.T) {
	folder, images := t.TempDir(), t.TempDir()
	t.Setenv("CUVMM_SIM", `{"Folder": "`+folder+`"}`)
	first := serving(t, folder)
	ctx := peertest.Context(t)
	k, err := broker.Dial(ctx, first.path, broker.DialOptions{Wait: true})
	require.NoError(t, err)
	d := first.sys.Devices()[0]
	m := &handles.Manifest{Bytes: 1 << 20, Tensors: []handles.Tensor{{Name: "t", Element: handles.Uint8, Shape: []int{5}, Offset: 4096}}}
	var fleeting *broker.Object
	write := func(name string, m *handles.Manifest, o broker.CreateOptions) {
		o.Bytes = 1 << 20
		w, err := k.Create(ctx, d, name, o)
		require.NoError(t, err)
		part, err := w.Buffer().Slice(4096, 4101)
		require.NoError(t, err)
		require.NoError(t, part.CopyFrom(nil, []byte(name[:5])))
		got, err := w.Commit(ctx, m)
		require.NoError(t, err)
		if o.Ephemeral {
			fleeting = got
		} else {
			require.NoError(t, got.Close())
		}
	}
	write("../odd name", m, broker.CreateOptions{})
	write("plain", m, broker.CreateOptions{})
	long := strings.Repeat("ü", 127) // 254 bytes, 762 of them escaped
	write(long, m, broker.CreateOptions{})
	write("empty", nil, broker.CreateOptions{})
	write("fleeting", m, broker.CreateOptions{Ephemeral: true})
	objects := func(s *served, args ...string) (code int, out, complaints string) {
		var o, c bytes.Buffer
		code = run(append([]string{"objects", "-socket", s.path, "-driver", "sim"}, args...), &o, &c, thisHost())
		return code, o.String(), c.String()
	}
	does := func(s *served, args ...string) string {
		code, out, complaints := objects(s, args...)
		require.Equal(t, exitOK, code, complaints)
		return out
	}
	list := does(first)
	require.Regexp(t, `(?m)^"fleeting" +5, ephemeral +2 MiB +`+d.UUID().String()+` +\d+ .* `+strconv.Itoa(os.Getpid())+`$`, list)
	require.Contains(t, does(first, "-json"), `"Name": "plain"`)
	require.Contains(t, does(first, "-json"), `"Device": "`+d.UUID().String()+`"`)
	h := thisHost()
	h.command = smi("", nil)
	var top, complaintsOfTop bytes.Buffer
	require.Equal(t, exitOK, run([]string{"top", "-socket", first.path}, &top, &complaintsOfTop, h), complaintsOfTop.String())
	require.Regexp(t, `(?m)^ +`+strconv.Itoa(os.Getpid())+` .*\n +holds object "fleeting", version 5: 2 MiB$`, top.String())
	require.Contains(t, top.String(), "objects of the broker at "+first.path+":\nNAME")
	snapshot, err := inspect.Take(first.sys)
	require.NoError(t, err)
	require.Contains(t, fmt.Sprintf("%+v", snapshot), "object fleeting", "maps name them")
	require.Equal(t, "\"../odd name\", version 1: has no digests\n\"empty\", version 4: has no digests\n\"plain\", version 2: has no digests\n\""+long+"\", version 3: has no digests\n", does(first, "verify"))
	write("partly", &handles.Manifest{Bytes: 1 << 20, Tensors: []handles.Tensor{
		{Name: "t", Element: handles.Uint8, Shape: []int{5}, Offset: 4096, Digest: "crc32c:00000000"}, {Name: "u", Element: handles.Uint8, Shape: []int{5}, Offset: 8192},
	}}, broker.CreateOptions{})
	code, _, complaints := objects(first, "verify")
	require.Equal(t, exitFailed, code, "some of its tensors have a digest")
	require.Contains(t, complaints, "has no digest; have its writer commit it with digests")
	require.Empty(t, does(first, "remove", "partly"))
	code, _, complaints = objects(first, "verify", "plain", "none")
	require.Equal(t, exitFailed, code)
	require.Contains(t, complaints, "has no digest; have its writer commit it with digests")
	require.Contains(t, complaints, "no such object", "and it goes on")
	require.Contains(t, does(first, "save", images), `"empty", version 4: not saved`)
	names, err := filepath.Glob(images + "/*")
	require.NoError(t, err)
	require.Len(t, names, 3)
	require.Regexp(t, `/%C3%BC%C3.*-[0-9a-f]{16}\.safetensors$`, names[0])
	require.Equal(t, []string{images + "/..%2Fodd%20name.safetensors", images + "/plain.safetensors"}, names[1:])
	code, _, complaints = objects(first, "load", t.TempDir())
	require.Equal(t, exitFailed, code)
	require.Contains(t, complaints, "has no file that ends in .safetensors")
	code, _, complaints = objects(first, "load", images+"/none")
	require.Equal(t, exitFailed, code)
	require.Equal(t, 1, strings.Count(complaints, "no such file or directory"), complaints)
	require.Contains(t, does(first, "load", images), `"plain", version 2: was there`)

	require.Empty(t, does(first, "remove", "empty"))
	require.NoError(t, fleeting.Close())
	require.NoError(t, k.Close())
	first.end(t)

	second := serving(t, folder)
	k, err = broker.Dial(ctx, second.path, broker.DialOptions{Wait: true})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(images+"/broken.safetensors", []byte("broken"), 0o600))
	code, out, complaints := objects(second, "load", images)
	require.Equal(t, exitFailed, code)
	require.Contains(t, complaints, "broken.safetensors")
	require.Contains(t, out, `"plain", version 3: loaded from `+images+"/plain.safetensors, 2 MiB in ")
	require.Equal(t, "\"../odd name\", version 2: as it was committed\n\"plain\", version 3: as it was committed\n\""+long+"\", version 1: as it was committed\n", does(second, "verify"))
	got, err := k.Attach(ctx, second.sys.Devices()[0], "../odd name", broker.AttachOptions{})
	require.NoError(t, err)
	five := make([]byte, 5)
	_, part, err := got.Tensor("t")
	require.NoError(t, err)
	require.NoError(t, part.CopyTo(nil, five))
	require.Equal(t, "../od", string(five))
	status := does(second, "status")
	require.Contains(t, status, "# TYPE cuvmm_broker_objects gauge\ncuvmm_broker_objects 3\n")
	require.Contains(t, status, "cuvmm_broker_commits_total 3\n")
	require.Contains(t, status, "cuvmm_broker_publications 0\n")
	require.NoError(t, syscall.Kill(childOf(t, second.Process.Pid), syscall.SIGKILL))
	require.Eventually(t, func() bool {
		code, _, complaints = objects(second, "status")
		return code == exitFailed && strings.Contains(complaints, "not ready")
	}, peertest.Guard, time.Millisecond)
	require.NoError(t, got.Close())
	require.NoError(t, k.Close())
	for _, args := range [][]string{{"fly"}, {"save"}, {"list", "x"}, {"load"}} {
		code, _, _ := objects(second, args...)
		require.Equal(t, exitUsage, code, args)
	}
	second.end(t)
	code, _, complaints = objects(second)
	require.Equal(t, exitFailed, code)
	require.Contains(t, complaints, "no broker serves "+second.path+": start one with cuvmm serve")
}

// A policy is read again when its file changes, and one with a mistake changes nothing.
func TestServeObeysAPolicy(t *testing.T) {
	file := t.TempDir() + "/policy.json"
	own := strconv.Itoa(os.Geteuid())
	says := func(text string) {
		require.NoError(t, os.WriteFile(file+".new", []byte(text), 0o600))
		require.NoError(t, os.Rename(file+".new", file))
	}
	says(`{"rules": [{"users": ["` + own + `"], "access": "read"}]}`)
	c := serving(t, t.TempDir(), "-policy", file)
	ctx := peertest.Context(t)
	k, err := broker.Dial(ctx, c.path, broker.DialOptions{Wait: true})
	require.NoError(t, err)
	info, err := os.Stat(filepath.Dir(c.path))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o711), info.Mode().Perm(), "others reach the socket")
	create := func(bytes int) error {
		w, err := k.Create(ctx, c.sys.Devices()[0], "w", broker.CreateOptions{Bytes: bytes})
		if err == nil {
			err = w.Close()
		}
		return err
	}
	require.ErrorIs(t, create(1), cuda.ErrNotPermitted)
	says(`{"rules": [{"users": ["` + own + `"], "access": "write", "limit": {"MiB": 4}}]}`)
	require.Eventually(t, func() bool { return create(1) == nil }, peertest.Guard, 10*time.Millisecond)
	require.ErrorIs(t, create(5<<20), broker.ErrLimit)
	says(`{"rules": [`)
	logged := func(text string) {
		require.Eventually(t, func() bool { return strings.Contains(c.log.String(), text) }, peertest.Guard, 10*time.Millisecond)
	}
	logged("the policy that is in force is not the file's")
	require.NoError(t, create(1))
	warning := func() string {
		s, err := k.Status(ctx)
		require.NoError(t, err)
		return s.Warning
	}
	require.Contains(t, warning(), "the policy that is in force is not the file's")
	require.Contains(t, warning(), "unexpected EOF")
	require.NoError(t, os.Remove(file))
	require.NoError(t, os.Mkdir(file, 0o700))
	require.Eventually(t, func() bool { return strings.Contains(warning(), "is no file") }, peertest.Guard, 10*time.Millisecond)
	time.Sleep(2*reread + reread/2)
	require.Equal(t, 1, strings.Count(c.log.String(), "is no file"), "said once")
	require.NoError(t, os.Remove(file))
	require.Eventually(t, func() bool { return strings.Contains(warning(), "no such file") }, peertest.Guard, 10*time.Millisecond)
	require.NoError(t, create(1))
	logged("no such file")
	says(`{"rules": [`)
	started := strings.Count(c.log.String(), "the broker was started")
	require.NoError(t, syscall.Kill(childOf(t, c.Process.Pid), syscall.SIGKILL))
	require.Eventually(t, func() bool { return strings.Count(c.log.String(), "the broker was started") > started }, peertest.Guard, time.Millisecond)
	require.ErrorIs(t, create(1), cuda.ErrNotPermitted, "a broker that has no policy grants nothing")
	require.Contains(t, warning(), "no policy is in force, so that nothing is granted")
	require.NoError(t, os.Remove(file))
	logged("no policy is in force, so that nothing is granted: the policy: stat")
	says(`{"rules": [{"users": ["*"], "access": "write"}]}`)
	require.Eventually(t, func() bool { return create(1) == nil }, peertest.Guard, 10*time.Millisecond)
	require.Empty(t, warning())
	require.NoError(t, k.Close())
	c.end(t)

	says(`{"rules": [`)
	var out, complaints bytes.Buffer
	pipe := file + ".pipe"
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	for _, path := range []string{file, file + "x", pipe} {
		require.Equal(t, exitFailed, run([]string{"serve", "-policy", path, "-socket", t.TempDir() + "/s/s"}, &out, &complaints, thisHost()))
		require.Contains(t, complaints.String(), path)
	}
}

// What a user commits under a rule with copy is copied by a process of the broker's, which ends with that, and the next
// broker has the copy.
func TestServeCopiesWhatAUserCommits(t *testing.T) {
	file := t.TempDir() + "/policy.json"
	require.NoError(t, os.WriteFile(file, []byte(`{"rules": [{"users": ["`+strconv.Itoa(os.Geteuid())+`"], "access": "write", "copy": true}]}`), 0o600))
	c := serving(t, t.TempDir(), "-policy", file)
	ctx, d := peertest.Context(t), c.sys.Devices()[0]
	k, err := broker.Dial(ctx, c.path, broker.DialOptions{Wait: true})
	require.NoError(t, err)
	w, err := k.Create(ctx, d, "w", broker.CreateOptions{Bytes: 3 << 20})
	require.NoError(t, err)
	part, err := w.Buffer().Slice(0, 5)
	require.NoError(t, err)
	require.NoError(t, part.CopyFrom(nil, []byte("bytes")))
	o, err := w.Commit(ctx, nil)
	require.NoError(t, err)
	reads := func(b *vmm.Buffer) string {
		five := make([]byte, 5)
		part, err := b.Slice(0, 5)
		require.NoError(t, err)
		require.NoError(t, part.CopyTo(nil, five))
		return string(five)
	}
	require.Equal(t, "bytes", reads(o.Buffer()))
	both, err := k.Status(ctx)
	require.NoError(t, err)
	require.Equal(t, []int{1, 0, 8 << 20}, []int{both.Objects, both.Writing, both.Bytes}, "the writer's memory, and the copy")
	require.NoError(t, o.Close())
	require.NoError(t, syscall.Kill(childOf(t, c.Process.Pid), syscall.SIGKILL))
	got, err := k.Attach(ctx, d, "w", broker.AttachOptions{})
	require.NoError(t, err)
	require.Equal(t, "bytes", reads(got.Buffer()))
	one, err := k.Status(ctx)
	require.NoError(t, err)
	require.Equal(t, 4<<20, one.Bytes)
	require.NoError(t, got.Close())
	require.NoError(t, k.Close())
	c.end(t)
}

// manager is a service manager, which keeps files for a service.
type manager struct {
	*net.UnixConn
	mu    sync.Mutex
	files map[string]*os.File
}

func newManager(t *testing.T) *manager {
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: t.TempDir() + "/notify", Net: "unixgram"})
	require.NoError(t, err)
	m := &manager{UnixConn: c, files: map[string]*os.File{}}
	done := make(chan struct{})
	go func() { defer close(done); m.keep() }()
	t.Cleanup(func() {
		_ = c.Close()
		<-done
		require.Empty(t, m.names())
	})
	return m
}

func (m *manager) keep() {
	text, rights := make([]byte, 4096), make([]byte, 4096)
	for {
		n, r, _, _, err := m.ReadMsgUnix(text, rights)
		if err != nil {
			return
		}
		var files []*os.File
		messages, _ := syscall.ParseSocketControlMessage(rights[:r])
		for _, c := range messages {
			numbers, _ := syscall.ParseUnixRights(&c)
			for _, n := range numbers {
				files = append(files, os.NewFile(uintptr(n), "stored"))
			}
		}
		said := string(text[:n])
		_, name, _ := strings.Cut(said, "FDNAME=")
		m.mu.Lock()
		switch {
		case strings.HasPrefix(said, "FDSTORE=1\n"):
			m.files[name], files = files[0], nil
		case strings.HasPrefix(said, "FDSTOREREMOVE=1\n"):
			_ = m.files[name].Close()
			delete(m.files, name)
		}
		m.mu.Unlock()
		for _, f := range files {
			_ = f.Close() // of a barrier
		}
	}
}

func (m *manager) names() (names []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.files))
}

// An object outlives the end of the whole service, in the store of the service manager, which passes the
// socket, too.
func TestServeLeavesItsFilesToTheServiceManager(t *testing.T) {
	folder, m := t.TempDir(), newManager(t)
	l, err := peer.Listen(t.TempDir()+"/s", "broker", peer.Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	socket, err := l.File()
	require.NoError(t, err)
	defer func() { require.NoError(t, socket.Close()) }()
	log := &testlog.Log{}
	start := func() *exec.Cmd {
		self, err := os.Executable()
		require.NoError(t, err)
		c := exec.Command("sh", "-c", `LISTEN_PID=$$ exec "$0" serve -driver sim`, self)
		names := append([]string{"cuvmm.socket"}, m.names()...)
		c.ExtraFiles = []*os.File{socket}
		m.mu.Lock() // until the process has the files
		defer m.mu.Unlock()
		for _, name := range names[1:] {
			c.ExtraFiles = append(c.ExtraFiles, m.files[name])
		}
		c.Env = append(os.Environ(), asChild+"=1", `CUVMM_SIM={"Folder": "`+folder+`"}`, "NOTIFY_SOCKET="+m.LocalAddr().String(),
			"LISTEN_FDS="+strconv.Itoa(len(names)), "LISTEN_FDNAMES="+strings.Join(names, ":"))
		c.Stderr = log
		require.NoError(t, c.Start())
		t.Cleanup(func() {
			if t.Failed() {
				t.Log(log.String())
			}
			_ = c.Process.Kill()
		})
		return c
	}
	c := start()
	machine, err := sim.New(sim.Options{Folder: folder})
	require.NoError(t, err)
	sys, err := machine.OpenOwned(cuda.Options{})
	require.NoError(t, err)
	d, ctx := sys.Devices()[0], peertest.Context(t)
	k, err := broker.Dial(ctx, l.Path(), broker.DialOptions{Wait: true})
	require.NoError(t, err)
	w, err := k.Create(ctx, d, "w", broker.CreateOptions{Bytes: 5})
	require.NoError(t, err)
	part, err := w.Buffer().Slice(0, 5)
	require.NoError(t, err)
	require.NoError(t, part.CopyFrom(nil, []byte("bytes")))
	o, err := w.Commit(ctx, nil)
	require.NoError(t, err)
	require.NoError(t, o.Close())
	for range 2 {
		require.Eventually(t, func() bool { return len(m.names()) == 0 }, peertest.Guard, time.Millisecond, "a service that runs has its files itself")
		require.NoError(t, c.Process.Signal(syscall.SIGTERM))
		require.NoError(t, c.Wait(), log.String())
		require.Equal(t, []string{"cuvmm-entries", "cuvmm-file-1", "cuvmm-file-2", "cuvmm-file-3"}, m.names(), "a chunk, a manifest, and the process that wrote them")
		c = start()
		got, err := k.Attach(ctx, d, "w", broker.AttachOptions{})
		require.NoError(t, err)
		five := make([]byte, 5)
		part, err := got.Buffer().Slice(0, 5)
		require.NoError(t, err)
		require.NoError(t, part.CopyTo(nil, five))
		require.Equal(t, "bytes", string(five))
		require.NoError(t, got.Close())
	}
	require.NoError(t, k.Remove(ctx, "w", 0))
	require.NoError(t, k.Close())
	other, err := broker.Dial(ctx, l.Path(), broker.DialOptions{})
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		s, err := other.Status(ctx)
		require.NoError(t, err)
		return s.Clients == 1
	}, peertest.Guard, time.Millisecond, "the client that wrote is forgotten")
	require.NoError(t, other.Close())
	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
	require.NoError(t, c.Wait(), log.String())
	require.Equal(t, []string{"cuvmm-entries"}, m.names(), "the versions go on")
	for name, f := range m.files {
		require.NoError(t, f.Close())
		delete(m.files, name)
	}
	_, _, err = d.MemoryInfo()
	require.NoError(t, err)
	require.NoError(t, sys.Close())
}

// The units and the manifest start commands that there are, with flags that there are.
func TestDeployedCommands(t *testing.T) {
	files, err := filepath.Glob("deploy/*")
	require.NoError(t, err)
	found := 0
	for _, path := range files {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, call := range regexp.MustCompile(`/usr/local/bin/cuvmm[ ,]+([^\]\n]+)`).FindAllStringSubmatch(string(text), -1) {
			args := strings.FieldsFunc(call[1], func(r rune) bool { return r == ' ' || r == ',' })
			at := slices.IndexFunc(commands(), func(c command) bool { return c.name == args[0] })
			require.GreaterOrEqual(t, at, 0, call)
			f := flag.NewFlagSet("", flag.ContinueOnError)
			commands()[at].flags(f)
			require.NoError(t, f.Parse(args[1:]), call)
			if args[0] == "objects" {
				require.Contains(t, verbs, f.Arg(0), call)
			}
			found++
		}
		for _, policy := range regexp.MustCompile(`(?s)policy.json: \|\n(.*?)\n---`).FindAllSubmatch(text, -1) {
			_, err := broker.ParsePolicy(policy[1])
			require.NoError(t, err)
			found++
		}
	}
	require.Equal(t, 5, found)
}

// childOf returns the one child of a process.
func childOf(t *testing.T, pid int) int {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/task/" + strconv.Itoa(pid) + "/children")
	require.NoError(t, err)
	if len(bytes.Fields(text)) == 0 { // started by another thread
		tasks, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/task")
		require.NoError(t, err)
		for _, task := range tasks {
			more, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/task/" + task.Name() + "/children")
			require.NoError(t, err)
			text = append(text, more...)
		}
	}
	all := strings.Fields(string(text))
	require.Len(t, all, 1)
	child, err := strconv.Atoi(all[0])
	require.NoError(t, err)
	return child
}

// Beside a broker that is stopped the commands say which process that is, and top lists what else there is.
func TestCommandsBesideAStoppedBroker(t *testing.T) {
	c := serving(t, t.TempDir())
	ctx := peertest.Context(t)
	k, err := broker.Dial(ctx, c.path, broker.DialOptions{Wait: true})
	require.NoError(t, err)
	w, err := k.Create(ctx, c.sys.Devices()[0], "w", broker.CreateOptions{Bytes: 1})
	require.NoError(t, err)
	kept, err := k.Keep(ctx, c.sys.Devices()[0], "kept", broker.KeepOptions{Bytes: 1})
	require.NoError(t, err)
	h := thisHost()
	h.command = smi("4711, x, 500\n", nil)
	cuvmm := func(args ...string) (code int, out, complaints string) {
		var o, c bytes.Buffer
		code = run(args, &o, &c, h)
		return code, o.String(), c.String()
	}
	code, out, complaints := cuvmm("top", "-socket", c.path)
	require.Equal(t, exitOK, code, complaints)
	require.Contains(t, out, `publishes "kept", which a broker keeps: 2 MiB`)
	require.Contains(t, out, `writes object "w": 2 MiB`)
	snapshot, err := inspect.Take(c.sys)
	require.NoError(t, err)
	require.Contains(t, fmt.Sprintf("%+v", snapshot), "publication kept", "maps name it")

	timeout := link.DefaultTimeout
	link.DefaultTimeout = 100 * time.Millisecond
	defer func() { link.DefaultTimeout = timeout }()
	pid := childOf(t, c.Process.Pid)
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	defer func() { _ = syscall.Kill(pid, syscall.SIGCONT) }()
	require.Eventually(t, func() bool { return strings.Contains(h.text(fmt.Sprintf("proc/%d/stat", pid)), ") T ") }, peertest.Guard, time.Millisecond)
	says := fmt.Sprintf("the broker at %s does not reply: process %d (%s) is stopped; have it go on with kill -CONT %[2]d\n", c.path, pid, h.text(fmt.Sprintf("proc/%d/comm", pid)))
	code, out, complaints = cuvmm("top", "-socket", c.path)
	require.Equal(t, exitOK, code, complaints)
	require.Contains(t, out, "4711  x ")
	require.Contains(t, out, "objects of a broker are not listed: "+says)
	code, out, complaints = cuvmm("top", "-socket", c.path, "-json")
	require.Equal(t, exitFailed, code)
	require.Contains(t, out, `"pid": 4711`)
	require.Equal(t, "cuvmm: "+says, complaints)
	code, _, complaints = cuvmm("objects", "-socket", c.path)
	require.Equal(t, exitFailed, code)
	require.Equal(t, "cuvmm: "+says, complaints)

	require.NoError(t, syscall.Kill(pid, syscall.SIGCONT))
	link.DefaultTimeout = timeout
	code, _, complaints = cuvmm("objects", "-socket", c.path, "remove", "nothing")
	require.Equal(t, exitFailed, code)
	require.Equal(t, `cuvmm: broker.Client.Remove: no such object: the broker refused: "an object of the name "nothing"; see whether the name is right, or have a process write it"`+"\n", complaints)
	require.NoError(t, w.Close())
	require.NoError(t, kept.Close())
	require.NoError(t, k.Remove(ctx, "kept", 0))
	require.NoError(t, k.Close())
	c.end(t)
}

// Who sees the socket may end what serves it.
func TestServeEndsAsSoonAsThereIsASocket(t *testing.T) {
	for range 40 {
		s := serving(t, t.TempDir())
		_, there := os.Lstat(s.path)
		for began := time.Now(); there != nil && time.Since(began) < peertest.Guard; { // a pause would miss the moment
			_, there = os.Lstat(s.path)
		}
		require.NoError(t, there)
		s.end(t)
		require.NoFileExists(t, s.path)
	}
}

// Without a driver there is nothing to serve, and nothing to try again.
func TestServeEndsWithoutADriver(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	c := exec.Command(self, "serve", "-socket", t.TempDir()+"/s/broker", "-driver", "real")
	c.Env = append(os.Environ(), asChild+"=1", "CUVMM_LIBCUDA=/nowhere/libcuda.so")
	said, err := c.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(said), "the broker ended before it began")
	require.Contains(t, string(said), "cuda.Open: no CUDA driver")
}

func TestServeRefusesWrongFlags(t *testing.T) {
	for _, args := range [][]string{{"serve", "-limit", "-1"}, {"serve", "-limit", "8796093022208"}, {"serve", "-limit-per-user", "8796093022208"}, {"serve", "-driver", "x"}, {"serve", "more"}, {"serve", "-policy", "x", "-limit-per-user", "1"}} {
		var out, complaints bytes.Buffer
		require.Equal(t, exitUsage, run(args, &out, &complaints, thisHost()), args)
	}
	self, err := os.Executable()
	require.NoError(t, err)
	c := exec.Command(self, brokerRole) // a process of its own, since it takes descriptor 3 over
	c.Env = append(os.Environ(), asChild+"=1")
	said, err := c.CombinedOutput()
	require.Error(t, err, "it has no keeper")
	require.Equal(t, exitFailed, c.ProcessState.ExitCode())
	require.Contains(t, string(said), "cuvmm serve")
}
