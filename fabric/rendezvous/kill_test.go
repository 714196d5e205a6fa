package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
)

// testTimeout guards against ranks that wait for each other for ever.
const testTimeout = 2 * time.Minute

// outcome is the result of a rank's last step, as its process reports it.
type outcome struct {
	Step  string
	Err   string
	Gone  bool // the error is that a rank is gone
	Files int
}

// names requires that the error names a rank.
func (o outcome) names(t *testing.T, rank int) {
	t.Helper()
	require.Regexp(t, fmt.Sprintf(`\branks? (\d+, )*%d\b`, rank), o.Err, "%+v", o)
}

// killRounds is how often a test kills a rank.
func killRounds(usual int) int {
	if n, err := strconv.Atoi(os.Getenv("CUVMM_KILL_ROUNDS")); err == nil {
		return n
	}
	return usual
}

func init() {
	reexec.Register("rank", func(c *reexec.Child) error {
		rank, _ := strconv.Atoi(c.Args[1])
		size, _ := strconv.Atoi(c.Args[2])
		limit, _ := time.ParseDuration(c.Args[3])
		g, err := Join(context.Background(), c.Args[0], rank, size, Options{Timeout: limit})
		if err != nil {
			return c.Send(outcome{Step: "join", Err: err.Error(), Gone: errors.Is(err, peer.ErrGone)})
		}
		return c.Send(steps(g, nil))
	})
}

// steps runs steps until one fails. It calls running when the first is done.
func steps(g *Group, running func()) (o outcome) {
	defer func() {
		_ = g.Close()
		o.Files = peer.OpenFDs()
	}()
	for i := 0; ; i++ {
		o.Step = fmt.Sprint("step ", i)
		_, err := g.AllGather(context.Background(), o.Step, make([]byte, 1000))
		if err != nil {
			o.Err = err.Error()
			o.Gone = errors.Is(err, peer.ErrGone)
			return o
		}
		if i == 0 && running != nil {
			running()
		}
		time.Sleep(time.Duration(rand.IntN(1000)) * time.Microsecond)
	}
}

// members starts the processes of all ranks but 0.
func members(t *testing.T, path string, size int, limit time.Duration) []*reexec.Cmd {
	children := make([]*reexec.Cmd, size)
	for r := 1; r < size; r++ {
		children[r] = reexec.Command(t, "rank", path, strconv.Itoa(r), strconv.Itoa(size), limit.String())
		children[r].Start()
	}
	return children
}

// Any process may be killed at any step: the other ranks fail the same step with the
// same error, which names it, and leave nothing open.
func TestKilledRanks(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("sockets with file descriptors need Linux")
	}
	for round := range killRounds(25) {
		const size = 4
		random := rand.New(rand.NewPCG(uint64(round), 1))
		victim := 1 + random.IntN(size-1)
		host, path, err := Host(filepath.Join(t.TempDir(), "private"), "", size, Options{Timeout: testTimeout})
		require.NoError(t, err)
		children := members(t, path, size, testTimeout)
		mine := steps(host, func() { time.AfterFunc(time.Duration(random.IntN(10_000))*time.Microsecond, children[victim].Kill) })
		check := func(r int, o outcome) {
			o.names(t, victim)
			require.True(t, o.Gone, "round %d, rank %d: %+v", round, r, o)
			require.Equal(t, [2]string{mine.Step, mine.Err}, [2]string{o.Step, o.Err}, "round %d, rank %d", round, r)
			require.Zero(t, o.Files)
		}
		check(0, mine)
		for r := 1; r < size; r++ {
			if r == victim {
				continue
			}
			var o outcome
			children[r].Recv(&o)
			children[r].Wait()
			check(r, o)
		}
	}
}

// A rank that is killed before or while it joins has not arrived by the limit, or is lost.
func TestRanksThatAreKilledAsTheyJoin(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("sockets with file descriptors need Linux")
	}
	for round := range killRounds(4) {
		const size = 3
		const limit = time.Second
		random := rand.New(rand.NewPCG(uint64(round), 3))
		victim := 1 + random.IntN(size-1)
		host, path, err := Host(filepath.Join(t.TempDir(), "private"), "", size, Options{Timeout: limit})
		require.NoError(t, err)
		children := members(t, path, size, limit)
		time.AfterFunc(time.Duration(random.IntN(50))*time.Millisecond, children[victim].Kill)
		mine := steps(host, nil)
		mine.names(t, victim)
		require.Zero(t, mine.Files)
		other := size - victim
		var o outcome
		children[other].Recv(&o)
		children[other].Wait()
		if o.Step != "join" { // it came when the group was over
			o.names(t, victim)
			require.Zero(t, o.Files)
		}
		children[victim].Kill() // and wait for its end
	}
}

// The group ends with the host's process.
func TestAKilledHost(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("sockets with file descriptors need Linux")
	}
	for range killRounds(5) {
		const size = 3
		dir := filepath.Join(t.TempDir(), "private")
		host := reexec.Command(t, "host", dir, strconv.Itoa(size))
		host.Start()
		var path string
		host.Recv(&path)
		done := make(chan outcome, size)
		for r := 1; r < size; r++ {
			g, err := Join(t.Context(), path, r, size, Options{Timeout: testTimeout})
			require.NoError(t, err)
			go func() { done <- steps(g, nil) }()
		}
		time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
		host.Kill()
		for r := 1; r < size; r++ {
			o := <-done
			o.names(t, 0)
			require.True(t, o.Gone, "%+v", o)
		}
		require.Zero(t, peer.OpenFDs())
	}
}

func init() {
	reexec.Register("host", func(c *reexec.Child) error {
		size, _ := strconv.Atoi(c.Args[1])
		g, path, err := Host(c.Args[0], "", size, Options{Timeout: testTimeout})
		if err != nil {
			return err
		}
		if err := c.Send(path); err != nil {
			return err
		}
		steps(g, nil)
		return nil
	})
}
