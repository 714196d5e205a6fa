//go:build linux

package publish

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// as serves a client that counts as one of a process.
func (v *victim) as(pid int, uid uint32) (far *peer.Conn, over chan error) {
	near, far := peertest.Pair(v, peer.Options{})
	over = make(chan error, 1)
	go func() { over <- v.serveAs(near, peer.Credentials{PID: pid, UID: uid}) }()
	return far, over
}

// fewFiles sets this process's limit of open files.
func fewFiles(t *testing.T, n uint64) {
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: old.Max}))
	t.Cleanup(func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) })
}

// A process that follows much and reads nothing has a part of the descriptors on
// their way, and others are served beside it.
func TestAClientThatReadsNothingLeavesDescriptorsOnTheirWayToOthers(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	v.announce(19 << 19) // 20 chunks
	for v.honest.Len() != v.array.Len() {
		require.NoError(t, v.honest.Next(peertest.Context(t)))
	}
	fewFiles(t, 1024) // of which 512 may be on their way
	inFlight := func(pid int) (n int) {
		v.server.flights.mu.Lock()
		defer v.server.flights.mu.Unlock()
		v.server.flights.sweep()
		for f := range v.server.flights.all {
			if f.ss.process().PID == pid {
				n += f.n
			}
		}
		return n
	}
	for pid := 70_001; pid <= 70_003; pid++ {
		for range 3 {
			far, _ := v.as(pid, uint32(os.Geteuid()))
			for i := range 10 {
				require.NoError(t, far.Send(peertest.Context(t), pack(&follow{number: uint32(i), access: WriteAccess, name: "numbers"})))
			}
		}
		require.Eventually(t, func() bool { return inFlight(pid) >= 20 }, peertest.Guard, time.Millisecond)
	}
	require.Eventually(t, func() bool { return len(v.p.Stats().Followers) == 91 }, peertest.Guard, time.Millisecond)
	v.served()
	for pid := 70_001; pid <= 70_003; pid++ {
		require.LessOrEqual(t, inFlight(pid), 120+2*20, "and one of each further client")
	}
}

// What a client has not read counts no longer when it has gone.
func TestAClientThatGoesTakesItsDescriptorsOffTheCount(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	v.announce(19 << 19)
	const pid = 70_001
	deaf, over := v.as(pid, uint32(os.Geteuid()))
	inFlight := func() bool {
		v.server.flights.mu.Lock()
		defer v.server.flights.mu.Unlock()
		for f := range v.server.flights.all {
			if f.ss.process().PID == pid {
				return true
			}
		}
		return false
	}
	require.NoError(t, deaf.Send(peertest.Context(t), pack(&follow{number: 1, access: WriteAccess, name: "numbers"})))
	require.Eventually(t, inFlight, peertest.Guard, time.Millisecond)
	require.NoError(t, deaf.Close())
	require.NoError(t, <-over)
	require.False(t, inFlight())
}

// Clients that read nothing are cut off if others wait for what they hold, and
// not before.
func TestWhoReadsNothingIsCutOffWhereOthersWait(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	v.announce(19 << 19)
	for v.honest.Len() != v.array.Len() {
		require.NoError(t, v.honest.Next(peertest.Context(t)))
	}
	fewFiles(t, 96) // 48 may be on their way
	var ends []chan error
	for pid := 70_001; pid <= 70_002; pid++ {
		deaf, over := v.as(pid, uint32(os.Geteuid()))
		require.NoError(t, deaf.Send(peertest.Context(t), pack(&follow{number: 1, access: WriteAccess, name: "numbers"})))
		require.Eventually(t, func() bool {
			v.server.flights.mu.Lock()
			defer v.server.flights.mu.Unlock()
			for f := range v.server.flights.all {
				if f.ss.process().PID == pid {
					f.since = time.Now().Add(-2 * peertest.Guard) // long ago
					return true
				}
			}
			return false
		}, peertest.Guard, time.Millisecond)
		ends = append(ends, over)
	}
	select {
	case err := <-ends[0]:
		t.Fatal("no client waits: ", err)
	case <-time.After(20 * time.Millisecond):
	}
	v.served() // which needs 20 of the 48
	for _, over := range ends {
		require.ErrorIs(t, <-over, peer.ErrTimeout)
	}
}

// Processes take a part of the places, and the last are for those without one.
func TestTwoProcessesLeavePlaces(t *testing.T) {
	v := newVictim(t, ServerOptions{}, peer.Options{})
	own := uint32(os.Geteuid())
	listed := func(pid int) error {
		far, over := v.as(pid, own)
		if err := far.Send(peertest.Context(t), pack(&list{1})); err != nil {
			return <-over
		}
		if _, err := far.Receive(peertest.Context(t)); err != nil {
			return <-over
		}
		return nil
	}
	for pid := 70_001; pid <= 70_002; pid++ {
		for range 32 {
			require.NoError(t, listed(pid))
		}
		require.ErrorContains(t, listed(pid), "by one client")
	}
	require.NoError(t, listed(70_003))

	v = newVictim(t, ServerOptions{}, peer.Options{}, func(l *limits) { l.sessions, l.perProcess = 16, 16 })
	for range 11 {
		require.NoError(t, listed(70_001))
	}
	require.ErrorContains(t, listed(70_001), "for processes that have none")
	for pid := 70_002; pid <= 70_005; pid++ {
		require.NoError(t, listed(pid))
	}
	require.ErrorContains(t, listed(70_006), "16 is the most")
}

// A process that asks without end waits, whichever connection it asks on.
func TestFollowingHasARate(t *testing.T) {
	r := rates{perSecond: 10, burst: 3}
	now, p, q := time.Unix(1000, 0), peer.Credentials{PID: 1}, peer.Credentials{PID: 2}
	for range 3 {
		require.Zero(t, r.acquire(p, now))
	}
	require.Equal(t, 100*time.Millisecond, r.acquire(p, now))
	require.Equal(t, 200*time.Millisecond, r.acquire(p, now))
	require.Zero(t, r.acquire(q, now))
	now = now.Add(time.Second)
	require.Zero(t, r.acquire(p, now))
	for i := range 2 * mostBuckets {
		r.acquire(peer.Credentials{PID: 10 + i}, now)
	}
	require.LessOrEqual(t, len(r.all), 2*mostBuckets+2)
	r.acquire(peer.Credentials{PID: 3}, now.Add(time.Minute))
	require.Len(t, r.all, 1, "a process without requests is forgotten")

	v := newVictim(t, ServerOptions{}, peer.Options{}, func(l *limits) { l.followRate = 1 })
	far, _ := v.as(70_001, uint32(os.Geteuid()))
	for i := range 3 {
		require.NoError(t, far.Send(peertest.Context(t), pack(&follow{number: uint32(i), access: WriteAccess, name: "nothing"})))
	}
	for range 3 { // they wait, and are served
		m := v.receive(far)
		require.NoError(t, m.Close())
	}
	require.Positive(t, v.server.rates.acquire(peer.Credentials{PID: 70_001, UID: uint32(os.Geteuid())}, time.Now()))
}

// The policy says what is seen, read and written.
func TestWhoMayDoWhat(t *testing.T) {
	asked := make(chan peer.Credentials, 1000)
	v := newVictim(t, ServerOptions{Authorize: func(p peer.Credentials, known bool, name string) Access {
		if known && p.PID == os.Getpid() {
			return WriteAccess
		}
		asked <- p
		return map[string]Access{"numbers": ReadAccess}[name]
	}}, peer.Options{})
	hidden, err := Array(v.server, "hidden", v.array)
	require.NoError(t, err)
	require.NoError(t, hidden.Announce(peertest.Context(t), 10, nil))
	far, _ := v.as(70_001, 4711)
	k := NewClient(far)
	defer func() { require.NoError(t, k.Close()) }()
	all, err := k.List(peertest.Context(t))
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, "numbers", all[0].Name)
	require.Equal(t, ReadAccess, all[0].Access)
	require.Equal(t, peer.Credentials{PID: 70_001, UID: 4711}, <-asked)

	_, err = Follow[uint32](peertest.Context(t), k, v.dev, "hidden", FollowOptions{ReadOnly: true})
	require.ErrorIs(t, err, ErrUnknown)
	_, nowhere := Follow[uint32](peertest.Context(t), k, v.dev, "nowhr!", FollowOptions{ReadOnly: true})
	require.Equal(t, err.Error(), strings.ReplaceAll(nowhere.Error(), "nowhr!", "hidden"), "what is hidden looks like what is not there")
	_, err = Follow[uint32](peertest.Context(t), k, v.dev, "numbers", FollowOptions{})
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
	require.ErrorContains(t, err, "ReadOnly")
	_, err = Open[uint32](peertest.Context(t), k, v.dev, "numbers", handles.ImportOptions{})
	require.ErrorIs(t, err, cuda.ErrNotPermitted)
	a, err := Open[uint32](peertest.Context(t), k, v.dev, "numbers", handles.ImportOptions{ReadOnly: true})
	require.NoError(t, err)
	require.NoError(t, a.Close())
	f, err := Follow[uint32](peertest.Context(t), k, v.dev, "numbers", FollowOptions{ReadOnly: true})
	require.NoError(t, err)
	require.NoError(t, f.Next(peertest.Context(t)))
	require.Equal(t, 1000, f.Len())
	require.NoError(t, f.Close())
	require.Equal(t, []string{"none", "read", "write", "Access(9)"}, []string{NoAccess.String(), ReadAccess.String(), WriteAccess.String(), Access(9).String()})
	v.served()
}
