//go:build linux

package adversary

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// victim describes an honest publisher in a process of its own, which publishes
// an array under the name "p".
type victim struct {
	Dir     string // of its socket, "s"
	Folder  string // of its machine
	Timeout time.Duration
	Files   uint64 // limit of open files; 0 leaves it
}

// request is what the test asks the publisher to do.
type request struct {
	Do     string // announce, shrink, stats or close
	Chunks int
}

// reply is how it went.
type reply struct {
	Err                          string
	Files, Goroutines, Followers int
}

func init() {
	reexec.Register("adversary: publisher", published)
	reexec.Register("adversary: honest", func(c *reexec.Child) error {
		n, err := strconv.Atoi(c.Args[1])
		if err != nil {
			return err
		}
		return follows(context.Background(), c.Args[0], n)
	})
}

// published obeys requests until the test closes the pipe.
func published(c *reexec.Child) (err error) {
	var v victim
	if err := c.Recv(&v); err != nil {
		return err
	}
	if err := confine(v.Files, false); err != nil {
		return err
	}
	sys, err := machine(v.Folder)
	if err != nil {
		return err
	}
	stream, err := sys.Devices()[0].NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	l, err := peer.Listen(v.Dir, "s", peer.Options{Timeout: v.Timeout})
	if err != nil {
		return err
	}
	server := publish.NewServer(publish.ServerOptions{})
	array, err := vmm.NewArray[uint32](sys.Devices()[0], vmm.BufferOptions{Reserve: 64 * chunk, Chunks: vmm.FixedChunks(chunk), Memory: vmm.Properties{Handles: vmm.PosixFD}})
	if err != nil {
		return err
	}
	p, err := publish.Array(server, "p", array)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	serving := make(chan error, 1)
	go func() { serving <- server.Serve(ctx, l) }()
	if err := c.Send(reply{}); err != nil {
		return err
	}
	for {
		var r request
		if err := c.Recv(&r); err != nil {
			return nil //nolint:nilerr // the test is over
		}
		n := r.Chunks * chunk / 4
		var a reply
		var err error
		switch r.Do {
		case "announce":
			if err = array.Resize(stream, n); err == nil {
				err = array.All().CopyFrom(stream, ones(n))
			}
			if err == nil {
				err = p.Announce(ctx, n, stream)
			}
		case "shrink":
			err = p.Shrink(n, stream)
		case "stats":
			a.Files, a.Goroutines, a.Followers = openFiles("self"), runtime.NumGoroutine(), len(p.Stats().Followers)
		case "close":
			err = errors.Join(server.Close(), l.Close(), array.Close(), stream.Close(), sys.Close())
			<-serving
		}
		if err != nil {
			a.Err = err.Error()
		}
		if err := c.Send(a); err != nil {
			return err
		}
	}
}

// ones returns elements of which none is zero, as memory is at first.
func ones(n int) []uint32 {
	all := make([]uint32, n)
	for i := range all {
		all[i] = 1
	}
	return all
}

// confine limits this process's open files, and gives up root if it has it.
func confine(files uint64, unprivileged bool) error {
	if files > 0 {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: files, Max: files}); err != nil {
			return err
		}
	}
	if unprivileged && os.Geteuid() == 0 {
		return errors.Join(syscall.Setgroups(nil), syscall.Setgid(65534), syscall.Setuid(65534))
	}
	return nil
}

func machine(folder string) (*cuda.System, error) {
	m, err := sim.New(sim.Options{Folder: folder, Devices: []sim.DeviceOptions{{Granularity: chunk, Memory: 256 << 20}}})
	if err != nil {
		return nil, err
	}
	return m.OpenOwned(cuda.Options{})
}

// publisher is the test's side of a victim.
type publisher struct {
	t    *testing.T
	cmd  *reexec.Cmd
	path string
}

// starts starts the victim.
func (v victim) starts(t *testing.T) *publisher {
	t.Helper()
	if v.Dir == "" {
		v.Dir = filepath.Join(t.TempDir(), "private")
	}
	p := &publisher{t: t, cmd: reexec.Command(t, "adversary: publisher"), path: filepath.Join(v.Dir, "s")}
	p.cmd.Timeout = testTimeout
	p.cmd.Start()
	p.cmd.Send(v)
	var ready reply
	p.cmd.Recv(&ready)
	return p
}

// ask has the victim do something, and returns how it went; a hang fails the test.
func (p *publisher) ask(do string, n int) (r reply) {
	p.t.Helper()
	p.cmd.Send(request{do, n})
	p.cmd.Recv(&r)
	return r
}

// does requires that it goes well.
func (p *publisher) does(do string, n int) reply {
	p.t.Helper()
	r := p.ask(do, n)
	require.Empty(p.t, r.Err, "%s %d", do, n)
	return r
}

// serves requires that an honest follower gets so many chunks, and nothing that
// was not written.
func (p *publisher) serves(n int) {
	p.t.Helper()
	c := startChild(p.t, "honest", p.path, strconv.Itoa(n))
	c.cmd.Wait()
}

// ends requires that it closes everything, and ends.
func (p *publisher) ends() {
	p.t.Helper()
	p.does("close", 0)
	p.cmd.Wait()
}

// follows follows "p" until it shows so many chunks.
func follows(ctx context.Context, path string, n int) (err error) {
	ctx, cancel := context.WithTimeout(ctx, testTimeout)
	defer cancel()
	sys, err := machine("")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	c, err := peer.Dial(ctx, path, peer.Options{})
	if err != nil {
		return err
	}
	k := publish.NewClient(c)
	defer func() { err = errors.Join(err, k.Close()) }()
	f, err := publish.Follow[uint32](ctx, k, sys.Devices()[0], "p", publish.FollowOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	s, err := sys.Devices()[0].NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	for f.Len() != n*chunk/4 {
		if err := f.Next(ctx, s); err != nil {
			return fmt.Errorf("with %d elements: %w", f.Len(), err)
		}
	}
	got := make([]uint32, f.Len())
	part, err := f.Array().Slice(0, len(got))
	if err != nil {
		return err
	}
	if err := part.CopyTo(s, got); err != nil {
		return err
	}
	for i, v := range got {
		if v == 0 {
			return fmt.Errorf("element %d of %d is shown and was never written", i, len(got))
		}
	}
	return nil
}
