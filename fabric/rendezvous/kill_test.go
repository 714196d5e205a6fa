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

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/reexec"
	"github.com/stretchr/testify/require"
)

// limit is how long the ranks of the test wait for each other; nobody may take
// longer than that and the time to tell.
const limit = 2 * time.Second

// outcome is what a rank's process saw of its last step.
type outcome struct {
	Step  string
	Err   string
	Gone  bool // the error is that a rank is gone, or gave up for that
	Took  time.Duration
	Files int
}

func init() {
	reexec.Register("rank", func(c *reexec.Child) error {
		path := c.Args[0]
		rank, _ := strconv.Atoi(c.Args[1])
		size, _ := strconv.Atoi(c.Args[2])
		g, err := Join(context.Background(), path, rank, size, Options{Timeout: limit})
		if err != nil {
			return c.Send(outcome{Step: "join", Err: err.Error(), Gone: errors.Is(err, handles.ErrGone)})
		}
		return c.Send(steps(g))
	})
}

// steps runs steps until one fails.
func steps(g *Group) (o outcome) {
	defer func() {
		_ = g.Close()
		o.Files = handles.OpenFDs()
	}()
	for i := 0; ; i++ {
		o.Step = fmt.Sprint("step ", i)
		began := time.Now()
		_, err := g.AllGather(context.Background(), o.Step, make([]byte, 1000))
		if err != nil {
			o.Err, o.Took = err.Error(), time.Since(began)
			o.Gone = errors.Is(err, handles.ErrGone) || errors.Is(err, ErrFailed)
			return o
		}
		time.Sleep(time.Duration(rand.IntN(1000)) * time.Microsecond)
	}
}

// Any process may be killed at any step: the others are told which, within the
// limit, and leave nothing open.
func TestKilledRanks(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("file descriptors travel on Linux only")
	}
	rounds := 25
	if n, err := strconv.Atoi(os.Getenv("CUVMM_KILL_ROUNDS")); err == nil {
		rounds = n
	}
	for round := range rounds {
		const size = 4
		random := rand.New(rand.NewPCG(uint64(round), 1))
		victim := 1 + random.IntN(size-1)
		dir := filepath.Join(t.TempDir(), "private")
		host, path, err := Host(dir, "", size, Options{Timeout: limit})
		require.NoError(t, err)
		children := make([]*reexec.Cmd, size)
		for r := 1; r < size; r++ {
			children[r] = reexec.Command(t, "rank", path, strconv.Itoa(r), strconv.Itoa(size))
			children[r].Start()
		}
		time.AfterFunc(time.Duration(random.IntN(60))*time.Millisecond, children[victim].Kill)
		mine := steps(host)
		require.Zero(t, mine.Files)
		named := fmt.Sprintf("rank %d", victim)
		// One that is killed before it joined has just not arrived.
		check := func(r int, o outcome) {
			if o.Step == "join" { // it came when the group was over
				return
			}
			require.Contains(t, o.Err, named, "round %d, rank %d: %+v", round, r, o)
			require.True(t, o.Gone || o.Step == "step 0", "round %d, rank %d: %+v", round, r, o)
			require.Less(t, o.Took, limit+farewell, "round %d, rank %d: %+v", round, r, o)
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

// The host's process is the group's middle: without it all others end.
func TestAKilledHost(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("file descriptors travel on Linux only")
	}
	for range 5 {
		const size = 3
		dir := filepath.Join(t.TempDir(), "private")
		host := reexec.Command(t, "host", dir, strconv.Itoa(size))
		host.Start()
		var path string
		host.Recv(&path)
		done := make(chan outcome, size)
		for r := 1; r < size; r++ {
			g, err := Join(t.Context(), path, r, size, Options{Timeout: limit})
			require.NoError(t, err)
			go func() { done <- steps(g) }()
		}
		time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
		host.Kill()
		for r := 1; r < size; r++ {
			o := <-done
			require.Contains(t, o.Err, "rank 0")
			require.Less(t, o.Took, limit+farewell)
			require.Zero(t, o.Files)
		}
	}
}

func init() {
	reexec.Register("host", func(c *reexec.Child) error {
		size, _ := strconv.Atoi(c.Args[1])
		g, path, err := Host(c.Args[0], "", size, Options{Timeout: limit})
		if err != nil {
			return err
		}
		if err := c.Send(path); err != nil {
			return err
		}
		steps(g)
		return nil
	})
}
