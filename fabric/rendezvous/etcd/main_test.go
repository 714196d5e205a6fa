package etcd

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	_ "github.com/cuvmm/cuvmm/internal/test/gputest" // with it, another library captures beside each test
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// aServer is an etcd server of one test.
type aServer struct {
	t        *testing.T
	endpoint string
	args     []string
	log      *os.File
	cmd      *exec.Cmd
}

// server starts one at an address of this host, and returns its endpoint.
func server(t *testing.T, host string) string { return newServer(t, host).endpoint }

func newServer(t *testing.T, host string) *aServer {
	t.Helper()
	program, err := exec.LookPath("etcd")
	if err != nil {
		needs.Lacks(t, "an etcd program (Debian: etcd-server)")
	}
	url := func() string {
		l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
		require.NoError(t, err)
		defer func() { _ = l.Close() }()
		return "http://" + l.Addr().String()
	}
	clients, peers := url(), url()
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	require.NoError(t, err)
	s := &aServer{t: t, endpoint: clients, log: log, args: []string{program, "--data-dir", t.TempDir(), "--name", "test",
		"--listen-client-urls", clients, "--advertise-client-urls", clients,
		"--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", "test=" + peers,
		"--unsafe-no-fsync"}}
	s.start()
	t.Cleanup(func() {
		s.kill()
		if t.Failed() {
			_, _ = log.Seek(0, io.SeekStart)
			text, _ := io.ReadAll(io.LimitReader(log, 1<<16))
			t.Logf("etcd: %s", text)
		}
		_ = log.Close()
	})
	return s
}

func (s *aServer) kill() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

// start starts the server, or starts it again, and waits until it serves.
func (s *aServer) start() {
	s.t.Helper()
	s.cmd = exec.Command(s.args[0], s.args[1:]...)
	s.cmd.Env = append(os.Environ(), "ETCD_UNSUPPORTED_ARCH="+runtime.GOARCH) // Debian's runs on all
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	require.NoError(s.t, s.cmd.Start())
	c := client(s.t, s.endpoint)
	for end := time.Now().Add(60 * time.Second); ; {
		ctx, cancel := context.WithTimeout(s.t.Context(), time.Second)
		_, err := c.Get(ctx, "ready")
		cancel()
		if err == nil {
			return
		}
		require.True(s.t, time.Now().Before(end), "etcd does not respond: %v", err)
	}
}

func newClient(endpoint string) (*clientv3.Client, error) {
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, DialTimeout: 5 * time.Second})
	if err != nil {
		return nil, fmt.Errorf("client of %s: %w", endpoint, err)
	}
	return c, nil
}

func client(t *testing.T, endpoint string) *clientv3.Client {
	t.Helper()
	c, err := newClient(endpoint)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}
