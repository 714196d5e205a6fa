package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// backings are the ways to make a group, for tests that hold for all.
var backings = []struct {
	name string
	open func(t *testing.T, size int, o Options) []*Group
}{
	{"in process", func(t *testing.T, size int, o Options) []*Group {
		groups, err := InProcess(size, o)
		require.NoError(t, err)
		return groups
	}},
	{"socket", func(t *testing.T, size int, o Options) []*Group {
		if runtime.GOOS != "linux" {
			t.Skip("sockets with file descriptors need Linux")
		}
		dir := filepath.Join(t.TempDir(), "private")
		host, path, err := Host(dir, "", size, o)
		require.NoError(t, err)
		groups := []*Group{host}
		for r := 1; r < size; r++ {
			g, err := Join(t.Context(), path, r, size, o)
			require.NoError(t, err)
			groups = append(groups, g)
		}
		return groups
	}},
}

// each runs a test over all backings, and requires that nothing is left.
func each(t *testing.T, size int, o Options, test func(t *testing.T, groups []*Group)) {
	t.Helper()
	for _, b := range backings {
		t.Run(b.name, func(t *testing.T) {
			files := peer.OpenFDs()
			groups := b.open(t, size, o)
			defer func() {
				var all sync.WaitGroup
				for _, g := range groups {
					all.Go(func() { _ = g.Close() })
				}
				all.Wait()
				require.Equal(t, files, peer.OpenFDs(), "files are left open")
			}()
			test(t, groups)
		})
	}
}

// together runs f for every rank at once, and returns the errors by rank.
func together(groups []*Group, f func(g *Group) error) []error {
	errs := make([]error, len(groups))
	var all sync.WaitGroup
	for r, g := range groups {
		all.Go(func() { errs[r] = f(g) })
	}
	all.Wait()
	return errs
}

func TestAllGather(t *testing.T) {
	each(t, 5, Options{}, func(t *testing.T, groups []*Group) {
		for _, err := range together(groups, func(g *Group) error {
			for step := range 20 {
				all, err := g.AllGather(t.Context(), fmt.Sprint("step ", step), fmt.Appendf(nil, "%d of %d", g.Rank(), step))
				if err != nil {
					return err
				}
				for r, b := range all {
					if want := fmt.Sprintf("%d of %d", r, step); string(b) != want {
						return fmt.Errorf("rank %d reads %q of rank %d, want %q", g.Rank(), b, r, want)
					}
				}
				if err := g.Barrier(t.Context(), "barrier"); err != nil {
					return err
				}
			}
			return nil
		}) {
			require.NoError(t, err)
		}
	})
}

func TestOneRankAlone(t *testing.T) {
	each(t, 1, Options{}, func(t *testing.T, groups []*Group) {
		all, err := groups[0].AllGather(t.Context(), "alone", []byte("me"))
		require.NoError(t, err)
		require.Equal(t, [][]byte{[]byte("me")}, all)
	})
}

func TestFilesTravel(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("sockets with file descriptors need Linux")
	}
	each(t, 3, Options{}, func(t *testing.T, groups []*Group) {
		dir := t.TempDir()
		for _, err := range together(groups, func(g *Group) error {
			var mine Contribution
			for i := range g.Rank() { // rank 0 brings none
				f, err := os.Create(filepath.Join(dir, fmt.Sprintf("%d-%d", g.Rank(), i)))
				if err != nil {
					return err
				}
				defer f.Close()
				fmt.Fprintf(f, "file %d of rank %d", i, g.Rank())
				if err := f.Sync(); err != nil {
					return err
				}
				fd, err := duplicate(f)
				if err != nil {
					return err
				}
				mine.Files = append(mine.Files, fd)
			}
			defer mine.Close()
			all, err := g.Exchange(t.Context(), "files", mine)
			if err != nil {
				return err
			}
			for r := range all {
				if len(all[r].Files) != r {
					return fmt.Errorf("%d files of rank %d", len(all[r].Files), r)
				}
				for i, fd := range all[r].Files {
					f, err := fd.File("received")
					if err != nil {
						return err
					}
					b := make([]byte, 64)
					n, _ := f.ReadAt(b, 0)
					_ = f.Close()
					if want := fmt.Sprintf("file %d of rank %d", i, r); string(b[:n]) != want {
						return fmt.Errorf("read %q, want %q", b[:n], want)
					}
				}
			}
			return nil
		}) {
			require.NoError(t, err)
		}
	})
}

func TestAMissingRankIsNamed(t *testing.T) {
	each(t, 4, Options{}, func(t *testing.T, groups []*Group) {
		for _, g := range groups {
			g.timeout = time.Second
		}
		errs := together(groups, func(g *Group) error {
			if g.Rank() == 2 {
				return nil
			}
			return g.Barrier(t.Context(), "create")
		})
		for r, err := range errs {
			if r == 2 {
				continue
			}
			require.ErrorIs(t, err, peer.ErrTimeout, "rank %d", r)
			require.Regexp(t, `\branks? (\d, )*2\b`, err.Error()) // other ranks may have been late too
			require.ErrorContains(t, err, `"create"`)
			require.Equal(t, err, groups[r].Barrier(t.Context(), "later"), "a group that failed stays so")
		}
		errs[2] = groups[2].Barrier(t.Context(), "create")
		oneOutcome(t, errs)
	})
}

func TestTheCallersContextEndsAStep(t *testing.T) {
	each(t, 2, Options{}, func(t *testing.T, groups []*Group) {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(20*time.Millisecond, cancel)
		err := groups[0].Barrier(ctx, "wait")
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorContains(t, err, "before the arrival of rank 1")
		oneOutcome(t, []error{err, groups[1].Barrier(t.Context(), "wait")})
	})
}

func TestARankThatGivesUp(t *testing.T) {
	each(t, 3, Options{}, func(t *testing.T, groups []*Group) {
		reason := errors.New("no memory")
		errs := together(groups, func(g *Group) error {
			if g.Rank() == 1 {
				g.Fail(reason)
			}
			return g.Barrier(t.Context(), "bind")
		})
		for r, err := range errs {
			require.ErrorIs(t, err, ErrFailed)
			require.ErrorContains(t, err, "rank 1")
			require.ErrorContains(t, err, "no memory")
			var e *Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, []int{1}, e.Ranks, "rank %d", r)
		}
		require.ErrorIs(t, errs[1], reason)
		oneOutcome(t, errs)
	})
}

func TestARankThatLeaves(t *testing.T) {
	each(t, 3, Options{}, func(t *testing.T, groups []*Group) {
		errs := together(groups, func(g *Group) error {
			if err := g.Barrier(t.Context(), "first"); err != nil {
				return err
			}
			if g.Rank() == 2 { // its earlier arrival still counts
				return g.Close()
			}
			return nil
		})
		for _, err := range errs {
			require.NoError(t, err)
		}
		errs = together(groups[:2], func(g *Group) error { return g.Barrier(t.Context(), "second") })
		require.ErrorIs(t, errs[0], peer.ErrGone)
		require.ErrorContains(t, errs[0], "rank 2: left the group")
		oneOutcome(t, errs)
		require.ErrorIs(t, groups[2].Barrier(t.Context(), "third"), cuda.ErrClosed)
	})
}

func TestRanksAtDifferentSteps(t *testing.T) {
	each(t, 3, Options{}, func(t *testing.T, groups []*Group) {
		errs := together(groups, func(g *Group) error {
			if g.Rank() == 0 {
				return g.Barrier(t.Context(), "map")
			}
			return g.Barrier(t.Context(), "bind")
		})
		require.ErrorIs(t, errs[0], ErrDisagree)
		require.ErrorContains(t, errs[0], `at "map"`)
		require.ErrorContains(t, errs[0], `at "bind"`)
		oneOutcome(t, errs)
	})
}

// An invalid contribution ends the group, and the other ranks receive the reason.
func TestWhatCannotTravel(t *testing.T) {
	for name, c := range map[string]struct {
		step string
		p    Contribution
		says string
	}{
		"too many bytes":  {"big", Contribution{Body: make([]byte, MaxBody+1)}, "share the memory itself"},
		"too many files":  {"big", Contribution{Files: make([]*peer.FD, MaxFiles+1)}, "larger chunks"},
		"a nil file":      {"big", Contribution{Files: make([]*peer.FD, 1)}, "file 0 is nil"},
		"too long a name": {strings.Repeat("n", MaxName+1), Contribution{}, "a name of 257 bytes"},
		"a name of bytes": {"n\xff", Contribution{}, "a name that is not UTF-8"},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, 2, Options{}, func(t *testing.T, groups []*Group) {
				for i, err := range together(groups, func(g *Group) error {
					if g.Rank() == 1 {
						return g.Barrier(t.Context(), "small")
					}
					_, err := g.Exchange(t.Context(), c.step, c.p)
					return err
				}) {
					require.ErrorIs(t, err, []error{cuda.ErrInvalidArgument, ErrFailed}[i])
					require.ErrorContains(t, err, "rank 0")
					require.ErrorContains(t, err, c.says)
				}
			})
		})
	}
}

func TestCloseEndsAStepThatRuns(t *testing.T) {
	each(t, 2, Options{}, func(t *testing.T, groups []*Group) {
		done := make(chan error, 1)
		go func() { done <- groups[0].Barrier(t.Context(), "never") }()
		time.Sleep(10 * time.Millisecond)
		require.NoError(t, groups[0].Close())
		require.NoError(t, groups[0].Close())
		require.ErrorIs(t, <-done, cuda.ErrClosed)
	})
}

func TestGroupsOfNoSize(t *testing.T) {
	for _, size := range []int{-1, 0, MaxSize + 1} {
		_, err := InProcess(size, Options{})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		_, _, err = Host(filepath.Join(t.TempDir(), "d"), "", size, Options{})
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	_, err := Join(t.Context(), "nowhere", 2, 2, Options{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
}

func TestAgree(t *testing.T) {
	const all = vmm.Fabric | vmm.PosixFD
	for name, c := range map[string]struct {
		facts []Facts
		want  vmm.HandleTypes
		why   string
	}{
		"fabric on one host":           {[]Facts{{Host: "a", Handles: all}, {Host: "a", Handles: all}}, vmm.Fabric, ""},
		"fabric in one clique":         {[]Facts{{Host: "a", Handles: all, Clique: "c.1"}, {Host: "b", Handles: vmm.Fabric, Clique: "c.1"}}, vmm.Fabric, ""},
		"one rank without fabric":      {[]Facts{{Host: "a", Handles: all}, {Host: "a", Handles: vmm.PosixFD}}, vmm.PosixFD, "rank 1"},
		"two cliques of one host":      {[]Facts{{Host: "a", Handles: all, Clique: "c.1"}, {Host: "a", Handles: all, Clique: "c.2"}}, vmm.PosixFD, "rank 1"},
		"no known clique on one host":  {[]Facts{{Host: "a", Handles: all, Clique: "c.1"}, {Host: "a", Handles: all}}, vmm.Fabric, ""},
		"two that rank 0 reaches both": {[]Facts{{Host: "a", Handles: all, Clique: "c.1"}, {Host: "a", Handles: all}, {Host: "b", Handles: all, Clique: "c.1"}}, 0, "rank 2"},
		"two cliques, two hosts":       {[]Facts{{Host: "a", Handles: all, Clique: "c.1"}, {Host: "b", Handles: all, Clique: "c.2"}}, 0, "rank 1"},
		"two hosts, no fabric":         {[]Facts{{Host: "a", Handles: vmm.PosixFD}, {Host: "b", Handles: vmm.PosixFD}}, 0, "another host"},
		"nothing in common":            {[]Facts{{Host: "a", Handles: vmm.PosixFD}, {Host: "a", Handles: vmm.Fabric}}, 0, "rank 0"},
		"two hosts of no known clique": {[]Facts{{Host: "a", Handles: all}, {Host: "b", Handles: all}}, 0, "different hosts"},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, len(c.facts), Options{}, func(t *testing.T, groups []*Group) {
				var mu sync.Mutex
				var agreements []Agreement
				errs := together(groups, func(g *Group) error {
					a, err := Agree(t.Context(), g, c.facts[g.Rank()])
					mu.Lock()
					defer mu.Unlock()
					agreements = append(agreements, a)
					return err
				})
				for _, err := range errs {
					if c.want == 0 {
						require.ErrorIs(t, err, ErrDisagree)
						require.ErrorContains(t, err, c.why)
					} else {
						require.NoError(t, err)
					}
				}
				for _, a := range agreements {
					require.Equal(t, c.want, a.Handle)
					require.Equal(t, agreements[0], a, "all agree on all of it")
					if c.want == vmm.PosixFD {
						require.Contains(t, a.Downgrade, c.why)
					}
				}
			})
		})
	}
}

func TestManyGroupsAtOnce(t *testing.T) {
	var all errgroup.Group
	for range 20 {
		all.Go(func() error {
			groups, err := InProcess(4, Options{})
			if err != nil {
				return err
			}
			for _, err := range together(groups, func(g *Group) error {
				defer g.Close()
				return g.Barrier(t.Context(), "go")
			}) {
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, all.Wait())
}
