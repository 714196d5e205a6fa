package etcd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
)

// outcome is what a rank saw of its last step.
type outcome struct {
	Step string
	Err  string
	Gone bool
}

// hostsLimit is how long the ranks wait for each other.
const hostsLimit = 2 * time.Minute

func init() {
	reexec.Register("rank over etcd", func(c *reexec.Child) error {
		var endpoint string
		if err := c.Recv(&endpoint); err != nil { // its network is there by now
			return err
		}
		rank, _ := strconv.Atoi(c.Args[1])
		size, _ := strconv.Atoi(c.Args[2])
		client, err := newClient(endpoint)
		if err != nil {
			return err
		}
		defer func() { _ = client.Close() }()
		ctx, cancel := context.WithTimeout(context.Background(), hostsLimit)
		defer cancel()
		g, err := Join(ctx, client, c.Args[0], rank, size, Options{TTL: 3 * time.Second, Options: rendezvous.Options{Timeout: hostsLimit}})
		if err != nil {
			return err
		}
		defer func() { _ = g.Close() }()
		for i := 0; ; i++ {
			o := outcome{Step: fmt.Sprint("step ", i)}
			if _, err := g.AllGather(ctx, o.Step, make([]byte, 1000)); err != nil {
				o.Err = err.Error()
				o.Gone = errors.Is(err, peer.ErrGone) || errors.Is(err, rendezvous.ErrFailed)
				return c.Send(o)
			}
			if i == 0 {
				if err := c.Send("joined"); err != nil {
					return err
				}
			}
		}
	})
}

// Processes in network namespaces of their own stand for hosts: they share no
// socket and no address, only what they reach through their own link. One is
// killed, and the others name it.
func TestHosts(t *testing.T) {
	ip, err := exec.LookPath("ip")
	if err != nil || os.Geteuid() != 0 {
		needs.Lacks(t, "root and the ip program (Debian: iproute2), for network namespaces")
	}
	probe := exec.Command("true")
	probe.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if err := probe.Run(); err != nil {
		needs.Lacks(t, "permission to make network namespaces: %v", err)
	}
	endpoint := server(t, "0.0.0.0")
	_, port, err := net.SplitHostPort(strings.TrimPrefix(endpoint, "http://"))
	require.NoError(t, err)
	const size = 3
	const session = "hosts"
	children := make([]*reexec.Cmd, size)
	for r := range children {
		c := reexec.Command(t, "rank over etcd", session, strconv.Itoa(r), strconv.Itoa(size))
		c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		c.Start()
		children[r] = c
		near := link(t, ip, c.Process.Pid, r)
		c.Send("http://" + net.JoinHostPort(near, port))
	}
	for _, c := range children {
		var joined string
		c.Recv(&joined)
	}
	victim := rand.IntN(size)
	time.Sleep(time.Duration(rand.IntN(50)) * time.Millisecond)
	children[victim].Kill()
	for r, c := range children {
		if r == victim {
			continue
		}
		var o outcome
		c.Recv(&o)
		c.Wait()
		require.True(t, o.Gone, "its lease ended, and not the step's limit: %+v", o)
		require.Contains(t, o.Err, fmt.Sprintf("rank %d", victim))
	}
}

// link joins a process's network to this one, and returns this side's address.
// It ends with the process.
func link(t *testing.T, ip string, pid, n int) string {
	t.Helper()
	net := rand.IntN(200)
	name := fmt.Sprintf("cuvmm%d", pid)
	near, far := fmt.Sprintf("10.%d.%d.1", 20+net, n), fmt.Sprintf("10.%d.%d.2", 20+net, n)
	for _, args := range [][]string{
		{ip, "link", "add", name, "type", "veth", "peer", "name", "far0", "netns", strconv.Itoa(pid)},
		{ip, "addr", "add", near + "/24", "dev", name},
		{ip, "link", "set", "dev", name, "up"},
		{"nsenter", "--net=/proc/" + strconv.Itoa(pid) + "/ns/net", ip, "addr", "add", far + "/24", "dev", "far0"},
		{"nsenter", "--net=/proc/" + strconv.Itoa(pid) + "/ns/net", ip, "link", "set", "dev", "far0", "up"},
	} {
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		if err != nil && strings.Contains(string(out), "not supported") {
			needs.Lacks(t, "virtual links: %s", out)
		}
		require.NoError(t, err, "%v: %s", args, out)
	}
	return near
}
