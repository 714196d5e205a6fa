//go:build linux && (amd64 || arm64)

package ledger

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/cuvmm/cuvmm/internal/host"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var page = host.PageSize()

var machine = Machine{Description: []byte("two pools"), Limits: []uint64{100 * page, 10 * page}}

func join(t require.TestingT, folder string) *Ledger {
	l, err := Open(folder, machine)
	require.NoError(t, err)
	require.NoError(t, l.Join())
	return l
}

// crash is what the system does with a process that is killed.
func (l *Ledger) crash() {
	_ = l.board.Close()
	_ = l.folder.Close()
}

// publish makes n pages of a pool shared memory.
func (l *Ledger) publish(t require.TestingT, pool int, n uint64) (id uint64) {
	require.True(t, l.Acquire(pool, n*page))
	id = l.NewID()
	file, err := l.NewFile(n * page)
	require.NoError(t, err)
	require.NoError(t, l.Publish(file, id, pool, n*page))
	require.NoError(t, file.Close())
	return id
}

func files(t require.TestingT, folder string) int {
	entries, err := os.ReadDir(folder)
	require.NoError(t, err)
	return len(entries) - 1 // the machine itself
}

func TestTheFirstDescribesTheMachine(t *testing.T) {
	folder := t.TempDir() + "/new"
	_, err := Read(folder)
	require.ErrorIs(t, err, os.ErrNotExist)
	a := join(t, folder)
	stat, err := os.Stat(folder)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), stat.Mode().Perm())
	b, err := Open(folder, Machine{Description: []byte("another"), Limits: []uint64{1}})
	require.NoError(t, err)
	require.Equal(t, "two pools", string(b.Description()))
	require.NoError(t, b.Close())
	require.NoError(t, a.Close())
	require.Zero(t, files(t, folder))
	require.NoError(t, os.WriteFile(folder+"/machine", []byte("something"), 0o600))
	_, err = Read(folder)
	require.ErrorContains(t, err, "not of a machine")
	_, err = Open(folder, Machine{Limits: make([]uint64, maxPools+1)})
	require.ErrorContains(t, err, "at most")
}

func TestFilesGetTheFoldersPermissions(t *testing.T) {
	folder := t.TempDir()
	require.NoError(t, os.Chmod(folder, 0o750))
	l := join(t, folder)
	defer l.Close()
	l.publish(t, 0, 1)
	entries, err := os.ReadDir(folder)
	require.NoError(t, err)
	require.Len(t, entries, 2)
	for _, e := range entries {
		info, err := e.Info()
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o640), info.Mode().Perm(), e.Name())
	}
}

// A process exports for as long as it likes.
func TestNumbersOfMemoriesAreNeverUsedTwice(t *testing.T) {
	folder := t.TempDir()
	a, b := join(t, folder), join(t, folder)
	theirs := b.NewID()
	for range 1<<24 + 1 {
		if a.NewID() == theirs {
			t.Fatalf("number %#x is given twice", theirs)
		}
	}
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
}

func TestLimitsAreShared(t *testing.T) {
	folder := t.TempDir()
	a, b := join(t, folder), join(t, folder)
	require.True(t, a.Acquire(1, 7*page))
	require.False(t, b.Acquire(1, 4*page))
	require.True(t, b.Acquire(1, 3*page))
	require.Zero(t, a.Free(1))
	require.Equal(t, 100*page, a.Free(0))
	a.Release(1, page)
	require.Equal(t, page, b.Free(1))
	a.crash()
	require.True(t, b.Acquire(1, 7*page), "what was killed holds nothing")
	require.NoError(t, b.Close())
}

func TestDescriptorsHoldMemory(t *testing.T) {
	folder := t.TempDir()
	a, b := join(t, folder), join(t, folder)
	id := a.publish(t, 0, 3)
	fd, err := a.Export(id)
	require.NoError(t, err)
	require.True(t, b.Is(id, fd))
	require.False(t, b.Is(id+1, fd))
	dup, err := unix.Dup(fd)
	require.NoError(t, err)
	a.crash()
	u := b.Usage()
	require.Len(t, u.Holders, 1)
	require.Equal(t, []Memory{{Pool: 0, Size: 3 * int(page), Maker: 1, Open: true}}, u.Memories)
	require.Equal(t, []int{3 * int(page), 0}, u.Taken)
	require.NoError(t, unix.Close(fd))
	require.Equal(t, 97*page, b.Free(0))

	require.True(t, b.Hold(id))
	require.NoError(t, unix.Close(dup))
	require.Equal(t, 97*page, b.Free(0))
	require.Equal(t, []uint64{2}, b.Usage().Memories[0].Held)
	b.Drop(id)
	require.Equal(t, 100*page, b.Free(0))
	require.False(t, b.Hold(id))
	b.Drop(id)
	require.Zero(t, files(t, folder))
	require.NoError(t, b.Close())
}

func TestFilesThatWereLeftDoNotPileUp(t *testing.T) {
	folder := t.TempDir()
	l := join(t, folder)
	defer l.Close()
	for range 50 {
		id := l.publish(t, 0, 1)
		fd, err := l.Export(id)
		require.NoError(t, err)
		l.Drop(id) // the descriptor holds it
		require.NoError(t, unix.Close(fd))
		require.LessOrEqual(t, files(t, folder), 3)
	}
	id := l.publish(t, 0, 1)
	fd, err := l.Export(id)
	require.NoError(t, err)
	for range 10 { // one that is dropped again and again is noted once
		require.True(t, l.Hold(id))
		l.Drop(id)
	}
	require.Len(t, l.givenUp, 1)
	require.NoError(t, unix.Close(fd))
	require.True(t, l.Acquire(0, page))
	require.Empty(t, l.givenUp)
	require.Zero(t, files(t, folder))
}

// A process that is killed in the middle of a transaction leaves some prefix of
// its stores.
func TestEveryPrefixOfAChangeIsSwept(t *testing.T) {
	for name, begin := range map[string]func(t *testing.T, l *Ledger){
		"join: the record is half made": func(t *testing.T, l *Ledger) {
			l.me.own[0].Store(page)
			l.me.serial.Store(0)
		},
		"publish: the holder's mark is made": func(t *testing.T, l *Ledger) {
			l.me.own[0].Store(page)
			l.header.memories.Store(1)
			l.me.hold(0)
		},
		"publish: the record is made, without a file": func(t *testing.T, l *Ledger) {
			l.me.own[0].Store(page)
			l.header.memories.Store(1)
			l.me.hold(0)
			l.books.memories[0].size.Store(page)
			l.books.memories[0].id.Store(7)
		},
		"publish: the file is linked, and its bytes are still the holder's own": func(t *testing.T, l *Ledger) {
			l.publish(t, 0, 1)
			l.me.own[0].Store(page)
		},
		"remove: the file is gone, the record is not": func(t *testing.T, l *Ledger) {
			id := l.publish(t, 0, 1)
			require.NoError(t, l.folder.Remove(fileOf(id)))
		},
		"clear: half of it is done": func(t *testing.T, l *Ledger) {
			l.publish(t, 0, 1)
			require.True(t, l.Acquire(1, page))
			l.me.own[0].Store(0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			folder := t.TempDir()
			watcher, victim := join(t, folder), join(t, folder)
			begin(t, victim)
			victim.lock() // and dies with it
			victim.crash()
			after := join(t, folder)
			for _, l := range []*Ledger{watcher, after} {
				require.Equal(t, 100*page, l.Free(0))
				require.Equal(t, 10*page, l.Free(1))
			}
			// The records serve again, without what was left in them.
			id := after.publish(t, 0, 1)
			require.Equal(t, [][]uint64{{after.me.serial.Load()}}, [][]uint64{watcher.Usage().Memories[0].Held})
			after.Drop(id)
			require.Zero(t, files(t, folder))
			require.NoError(t, after.Close())
			require.NoError(t, watcher.Close())
		})
	}
}

// Memory of processes that were all killed takes room in the system until the next
// process clears it away, before any reaches a limit.
func TestANewProcessClearsAway(t *testing.T) {
	folder := t.TempDir()
	a := join(t, folder)
	a.publish(t, 0, 1)
	id := a.publish(t, 0, 1)
	fd, err := a.Export(id)
	require.NoError(t, err)
	a.crash()
	b := join(t, folder)
	require.Equal(t, 1, files(t, folder), "the descriptor holds one")
	require.NoError(t, unix.Close(fd))
	require.Equal(t, 1, files(t, folder))
	c := join(t, folder)
	require.Zero(t, files(t, folder))

	offered := b.publish(t, 0, 1)
	b.Offer(offered)
	b.crash()
	require.False(t, c.Accept(offered))
	require.Zero(t, files(t, folder))
	require.NoError(t, c.Close())
}

// Other files may fill the file system beside the books, and a process that touches a
// page of them without room dies.
func TestTheBooksHaveTheirRoom(t *testing.T) {
	folder := t.TempDir()
	require.NoError(t, join(t, folder).Close())
	var stat unix.Stat_t
	require.NoError(t, unix.Stat(folder+"/machine", &stat))
	require.GreaterOrEqual(t, stat.Blocks*512, stat.Size)
}

func TestRecordsRunOut(t *testing.T) {
	folder := t.TempDir()
	l := join(t, folder)
	defer l.Close()
	l.header.memories.Store(maxMemories)
	for i := range l.books.memories {
		l.books.memories[i].id.Store(uint64(i) + 1<<60)
	}
	require.True(t, l.Acquire(0, page))
	file, err := l.NewFile(page)
	require.NoError(t, err)
	defer file.Close()
	require.NoError(t, l.Publish(file, l.NewID(), 0, page), "memories without a holder are swept")
	for i := range l.books.memories {
		l.books.memories[i].id.Store(uint64(i) + 1<<60)
		l.me.hold(i)
	}
	second, err := l.NewFile(page)
	require.NoError(t, err)
	defer second.Close()
	require.ErrorIs(t, l.Publish(second, l.NewID(), 0, page), ErrFull)

	for i := range l.books.holders {
		if h := &l.books.holders[i]; h != l.me {
			h.serial.Store(uint64(i) + 1<<50)
		}
	}
	l.header.holders.Store(maxHolders)
	other, err := Open(folder, machine)
	require.NoError(t, err)
	require.NoError(t, other.Join(), "holders that are gone are swept")
	require.NoError(t, other.Close())
}

// However several holders take, share, hold, drop and die, what is taken is what
// they hold.
func TestBooksMatchAModel(t *testing.T) {
	dir, runs := t.TempDir(), 0
	rapid.Check(t, func(t *rapid.T) {
		runs++
		folder := filepath.Join(dir, strconv.Itoa(runs))
		type piece struct {
			id, pages uint64
			held      map[*Ledger]bool
			fds       []int
		}
		var pieces []*piece
		own := map[*Ledger]uint64{}
		ledgers := []*Ledger{join(t, folder)} // the first stays
		draw := func(t *rapid.T) *Ledger { return rapid.SampledFrom(ledgers).Draw(t, "holder") }
		drawMortal := func(t *rapid.T) *Ledger {
			if len(ledgers) == 1 {
				t.Skip("no holder to end")
			}
			return rapid.SampledFrom(ledgers[1:]).Draw(t, "holder")
		}
		drawPiece := func(t *rapid.T, when func(*piece) bool) *piece {
			var some []*piece
			for _, p := range pieces {
				if when(p) {
					some = append(some, p)
				}
			}
			if len(some) == 0 {
				t.Skip("no such memory")
			}
			return rapid.SampledFrom(some).Draw(t, "memory")
		}
		taken := func() (n uint64) {
			for _, p := range own {
				n += p
			}
			for _, p := range pieces {
				if len(p.held) > 0 || len(p.fds) > 0 {
					n += p.pages
				}
			}
			return n
		}
		end := func(l *Ledger) {
			delete(own, l)
			for _, p := range pieces {
				delete(p.held, l)
			}
			for i := range ledgers {
				if ledgers[i] == l {
					ledgers = append(ledgers[:i], ledgers[i+1:]...)
					break
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"join": func(t *rapid.T) {
				if len(ledgers) < 4 {
					ledgers = append(ledgers, join(t, folder))
				}
			},
			"take": func(t *rapid.T) {
				l, n := draw(t), uint64(rapid.IntRange(1, 60).Draw(t, "pages"))
				fits := taken()+n <= 100
				require.Equal(t, fits, l.Acquire(0, n*page))
				if fits {
					own[l] += n
				}
			},
			"give": func(t *rapid.T) {
				l := draw(t)
				n := rapid.Uint64Range(0, own[l]).Draw(t, "pages")
				l.Release(0, n*page)
				own[l] -= n
			},
			"publish": func(t *rapid.T) {
				l := draw(t)
				if taken()+2 > 100 {
					t.Skip("full")
				}
				pieces = append(pieces, &piece{id: l.publish(t, 0, 2), pages: 2, held: map[*Ledger]bool{l: true}})
			},
			"export": func(t *rapid.T) {
				p := drawPiece(t, func(p *piece) bool { return len(p.held) > 0 })
				fd, err := draw(t).Export(p.id)
				require.NoError(t, err)
				p.fds = append(p.fds, fd)
			},
			"close a descriptor": func(t *rapid.T) {
				p := drawPiece(t, func(p *piece) bool { return len(p.fds) > 0 })
				require.NoError(t, unix.Close(p.fds[0]))
				p.fds = p.fds[1:]
			},
			"hold": func(t *rapid.T) {
				if len(pieces) == 0 {
					t.Skip("no memory")
				}
				l, p := draw(t), rapid.SampledFrom(pieces).Draw(t, "memory")
				// Memory without a holder may still be there: no process has looked.
				if l.Hold(p.id) {
					p.held[l] = true
				} else {
					require.Empty(t, p.held)
					require.Empty(t, p.fds)
				}
			},
			"drop": func(t *rapid.T) {
				l := draw(t)
				p := drawPiece(t, func(p *piece) bool { return p.held[l] })
				l.Drop(p.id)
				delete(p.held, l)
			},
			"leave": func(t *rapid.T) {
				l := drawMortal(t)
				require.NoError(t, l.Close())
				end(l)
			},
			"die": func(t *rapid.T) {
				l := drawMortal(t)
				l.crash()
				end(l)
			},
			"": func(t *rapid.T) {
				require.Equal(t, (100-taken())*page, ledgers[0].Free(0))
			},
		})
		for _, p := range pieces {
			for _, fd := range p.fds {
				require.NoError(t, unix.Close(fd))
			}
		}
		for _, l := range ledgers {
			require.NoError(t, l.Close())
		}
		last, err := Read(folder)
		require.NoError(t, err)
		require.Empty(t, last.Usage().Memories)
		require.Zero(t, last.Usage().Taken[0])
		require.NoError(t, last.Close())
		require.Zero(t, files(t, folder))
	})
}

func TestAnOfferIsGoodWhileItsMakerHoldsTheMemory(t *testing.T) {
	folder := t.TempDir()
	a, b, c := join(t, folder), join(t, folder), join(t, folder)
	defer b.Close()
	defer c.Close()
	id := a.publish(t, 0, 1)
	require.False(t, b.Accept(id), "it is not offered")
	a.Offer(id)
	a.Offer(id + 1)
	require.False(t, b.Accept(id+1))
	require.True(t, b.Accept(id))
	a.Drop(id)
	require.False(t, c.Accept(id), "its maker has let go of it")
	require.True(t, a.Hold(id))
	require.False(t, c.Accept(id), "and holds it as others do now")
	require.NotZero(t, b.Usage().Taken[0])
	b.Drop(id)
	second := a.publish(t, 0, 1)
	a.Offer(second)
	a.crash()
	require.False(t, c.Accept(second))
	require.Zero(t, b.Usage().Taken[0])
	require.Equal(t, b.Identity(), c.Identity())
	require.NotEqual(t, join(t, t.TempDir()).Identity(), b.Identity())
}

func TestADescriptorPinsOtherMemories(t *testing.T) {
	folder := t.TempDir()
	a, b := join(t, folder), join(t, folder)
	defer b.Close()
	first, second := a.publish(t, 0, 1), a.publish(t, 0, 2)
	fd, err := a.Pin([]uint64{first, second}, page, func(file []byte, id uint64) { require.NotZero(t, id) })
	require.NoError(t, err)
	third := a.publish(t, 0, 3)
	a.Drop(first)
	a.crash()
	require.Equal(t, 97*page, b.Free(0))
	require.False(t, b.Hold(third))
	require.NoError(t, unix.Close(fd))
	require.Equal(t, 100*page, b.Free(0))
	require.Zero(t, files(t, folder))
}

func TestSlotsAreCounted(t *testing.T) {
	folder := t.TempDir()
	a, b := join(t, folder), join(t, folder)
	defer b.Close()
	id := a.publish(t, 0, 1)
	require.True(t, a.AcquireSlot(id, 3))
	require.True(t, a.AcquireSlot(id, 1), "it has one")
	require.True(t, a.AcquireSlot(0, 3))
	require.True(t, b.AcquireSlot(0, 3))
	require.False(t, b.AcquireSlot(0, 3))
	b.ReleaseSlot()
	require.True(t, b.AcquireSlot(0, 3))
	require.True(t, b.Alive(a.Serial()))
	require.True(t, b.Exists(id))
	serial := a.Serial()
	a.crash()
	require.False(t, b.Alive(serial))
	require.True(t, b.AcquireSlot(0, 3))
	require.True(t, b.AcquireSlot(0, 3), "those of a process that is gone are free")
	require.False(t, b.AcquireSlot(0, 3))
	require.False(t, b.Exists(id))
}
