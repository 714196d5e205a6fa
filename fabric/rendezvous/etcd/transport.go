package etcd

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles/peer"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// DefaultPrefix is the default of Options.Prefix.
const DefaultPrefix = "/cuvmm/rendezvous/"

// DefaultTTL is the default of Options.TTL.
const DefaultTTL = 5 * time.Second

// farewell bounds how long a rank that leaves tries to say so.
const farewell = time.Second

// Options configure a group over etcd. The zero value works.
type Options struct {
	rendezvous.Options
	// Secret restricts the group to processes that have it. Empty admits every client
	// that may write to the server.
	Secret Secret
	// Prefix is the prefix of all keys; empty is DefaultPrefix.
	Prefix string
	// TTL is how long a rank's lease lasts without a sign of life, rounded up to whole
	// seconds: a rank that dies counts as lost after that. A server may prolong it by some
	// election timeouts. 0 is DefaultTTL.
	TTL time.Duration
}

// Join enters a group as one of its ranks, within Options.Timeout. All ranks name
// the same session, which no other group uses; a new group takes a new name. A
// rank that another process has, or a session whose group has begun, is
// cuda.ErrInUse; another size than that of an earlier rank is rendezvous.ErrDisagree, and
// another secret peer.ErrPeer. The client stays the caller's. The caller closes the group
// before the client.
func Join(ctx context.Context, client *clientv3.Client, session string, rank, size int, o Options) (*rendezvous.Group, error) {
	const op = "etcd.Join"
	switch {
	case client == nil:
		return nil, fmt.Errorf("%s: %w: a nil client; make one with clientv3.New", op, cuda.ErrInvalidArgument)
	case size < 1 || size > rendezvous.MaxSize || rank < 0 || rank >= size:
		return nil, fmt.Errorf("%s: %w: rank %d of %d: a group has 1 to %d ranks, counted from 0", op, cuda.ErrInvalidArgument, rank, size, rendezvous.MaxSize)
	case o.Check() != nil:
		return nil, fmt.Errorf("%s: %w", op, o.Check())
	case o.Secret.Check() != nil:
		return nil, fmt.Errorf("%s: %w", op, o.Secret.Check())
	case o.TTL < 0:
		return nil, fmt.Errorf("%s: %w: a TTL of %v: use 0 for %v, or more", op, cuda.ErrInvalidArgument, o.TTL, DefaultTTL)
	case session == "" || strings.Contains(session, "/"):
		return nil, fmt.Errorf("%s: %w: the session %q: name it, without a slash", op, cuda.ErrInvalidArgument, session)
	}
	if o.Prefix == "" {
		o.Prefix = DefaultPrefix
	}
	if o.TTL == 0 {
		o.TTL = DefaultTTL
	}
	if o.Timeout == 0 {
		o.Timeout = rendezvous.DefaultTimeout
	}
	t := newTransport(client, session, rank, size, o)
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	if err := t.enter(ctx); err != nil {
		t.end()
		t.work.Wait()
		return nil, fmt.Errorf("%s: session %q: %w", op, session, err)
	}
	return rendezvous.New(t, o.Options), nil
}

func newTransport(client *clientv3.Client, session string, rank, size int, o Options) *transport {
	t := &transport{client: client, prefix: strings.TrimSuffix(o.Prefix, "/") + "/" + session + "/",
		rank: rank, size: size, ttl: o.TTL, timeout: o.Timeout, secret: o.Secret,
		events: make(chan rendezvous.Event, 4*size), members: map[int]*record{}}
	t.life, t.end = context.WithCancel(context.Background())
	return t
}

// transport keeps, under its prefix, "rank/R" for every rank that is present, with the
// group's size, and of what rank R did "event/R/0" and "event/R/1", its latest arrivals at
// steps of an even and an odd number, and "event/R/end". A rank that arrives at a step
// shows that no rank needs the step before the last.
type transport struct {
	client       *clientv3.Client
	prefix       string
	rank, size   int
	ttl, timeout time.Duration
	lease        clientv3.LeaseID
	secret       Secret

	events chan rendezvous.Event
	// members are the ranks that ever joined. Only the goroutine of listen uses it, and Close once that has ended.
	members map[int]*record
	life    context.Context
	end     context.CancelFunc
	work    sync.WaitGroup
	once    sync.Once
}

// record says which events of a rank were delivered.
type record struct {
	// joined is the revision at which the rank's key was made, which tells its process
	// from a later one with the rank; 0 of a rank that had left before this one joined.
	joined int64
	// next is the first step at which its arrival has not been delivered.
	next uint64
}

func (t *transport) Rank() int          { return t.rank }
func (t *transport) Size() int          { return t.size }
func (t *transport) CarriesFiles() bool { return false }

func (t *transport) rankKey(r int) string { return t.prefix + "rank/" + strconv.Itoa(r) }

// grant returns a new lease.
func (t *transport) grant(ctx context.Context, ttl time.Duration) (clientv3.LeaseID, error) {
	lease, err := t.client.Grant(ctx, int64((ttl+time.Second-1)/time.Second))
	if err != nil {
		return 0, fmt.Errorf("no lease from the etcd server: %w; see whether it runs, and that this host reaches it", err)
	}
	return lease.ID, nil
}

// inOrder reads all keys of the group in the order in which they were written.
func (t *transport) inOrder() clientv3.Op {
	return clientv3.OpGet(t.prefix, clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByModRevision, clientv3.SortAscend))
}

// enter takes the rank, and watches the keys from that moment on.
func (t *transport) enter(ctx context.Context) (err error) {
	if t.lease, err = t.grant(ctx, t.ttl); err != nil {
		return err
	}
	alive, err := t.client.KeepAlive(t.life, t.lease)
	if err != nil {
		return err
	}
	key := t.rankKey(t.rank)
	reply, err := t.client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, seal(t.secret, key, strconv.AppendInt(nil, int64(t.size), 10)), clientv3.WithLease(t.lease)), t.inOrder()).
		Commit()
	if err != nil {
		err = fmt.Errorf("rank %d could not be written to the etcd server: %w; see whether it responds, and lets this client write under %q", t.rank, err, t.prefix)
	} else if !reply.Succeeded {
		err = fmt.Errorf("%w: rank %d is taken; %s", cuda.ErrInUse, t.rank, anotherSession)
	}
	var before []*mvccpb.KeyValue
	if err == nil {
		before = reply.Responses[1].GetResponseRange().Kvs
		err = t.fits(before)
	}
	if err != nil {
		_ = t.revoke()
		return err
	}
	// Watch has no context of its own for how long it waits for the server.
	stop := context.AfterFunc(ctx, t.end)
	watch := t.watch(t.life, reply.Header.Revision)
	if !stop() {
		_ = t.revoke()
		return fmt.Errorf("the etcd server does not respond: %w; see whether it runs and is reachable", ctx.Err())
	}
	leased, lost := context.WithCancel(t.life)
	t.work.Go(func() {
		defer lost()
		t.keep(alive)
	})
	t.work.Go(func() {
		if t.seeAll(before) {
			t.listen(leased, watch)
		}
	})
	return nil
}

// watch returns the changes after a revision.
func (t *transport) watch(ctx context.Context, revision int64) clientv3.WatchChan {
	return t.client.Watch(clientv3.WithRequireLeader(ctx), t.prefix, clientv3.WithPrefix(), clientv3.WithRev(revision+1))
}

// keep returns when this rank's lease has ended, or the group.
func (t *transport) keep(alive <-chan *clientv3.LeaseKeepAliveResponse) {
	for range alive {
		continue
	}
	if why := ranOut; t.life.Err() == nil {
		if t.client.Ctx().Err() != nil {
			why = clientClosed
		}
		t.ended(why)
	}
}

const (
	ranOut       = "this rank's lease ran out: it did not reach the etcd server for too long; see what held it up, or raise Options.TTL"
	clientClosed = "the client was closed: close the group before it"
)

// parse returns the rank that a key is of, and whether it is the rank's own, or else which
// of its events: "0", "1" or "end". Keys of no rank of this group are foreign, and not ok.
func (t *transport) parse(key string) (rank int, event string, ok bool) {
	rest, _ := strings.CutPrefix(key, t.prefix)
	kind, rest, _ := strings.Cut(rest, "/")
	r, event, _ := strings.Cut(rest, "/")
	rank, err := strconv.Atoi(r)
	switch {
	case err != nil || rank < 0 || r != strconv.Itoa(rank):
		return 0, "", false
	case kind == "rank":
		return rank, "", event == "" && rank < rendezvous.MaxSize
	}
	return rank, event, kind == "event" && rank < t.size && (event == "0" || event == "1" || event == "end")
}

const anotherSession = "name a session that no group has used"

// fits returns an error for a group that this rank cannot be part of: one of another
// size, or one that has passed its first step, which takes every rank.
func (t *transport) fits(before []*mvccpb.KeyValue) error {
	for _, kv := range before {
		rank, event, ok := t.parse(string(kv.Key))
		if !ok {
			continue
		}
		value, proved := open(t.secret, string(kv.Key), kv.Value)
		var e rendezvous.Event
		switch {
		case !proved && rank >= t.size: // foreign
		case !proved:
			return fmt.Errorf("%w: key %q was written without this rank's secret; %s", peer.ErrPeer, kv.Key, sameSecret)
		case event == "" && string(value) != strconv.Itoa(t.size):
			return fmt.Errorf("%w: rank %d has joined a group of %s, this one would a group of %d; name the same size in all processes", rendezvous.ErrDisagree, rank, value, t.size)
		case event != "" && e.UnmarshalBinary(value) == nil && e.Kind == rendezvous.Posted && e.Step.Number > 0:
			return fmt.Errorf("%w: rank %d is at step %d already, of a group that had another as rank %d; %s", cuda.ErrInUse, e.Rank, e.Step.Number, t.rank, anotherSession)
		}
	}
	return nil
}

const sameSecret = "give all ranks the same Options.Secret"

// listen delivers the events of all ranks, until the group ends or this rank's lease.
func (t *transport) listen(leased context.Context, watch clientv3.WatchChan) {
	for watch != nil {
		for changes := range watch {
			for _, c := range changes.Events {
				if c.Type == mvccpb.DELETE && !t.gone(string(c.Kv.Key)) || c.Type == mvccpb.PUT && !t.see(c.Kv) {
					return
				}
			}
		}
		watch = t.resume(leased)
	}
}

// resume watches again after the server ended the watch: because it has lost its leader, or
// has compacted what came after the last change that this client saw. So the keys tell what
// has happened since. It returns nil if the group has ended.
func (t *transport) resume(leased context.Context) clientv3.WatchChan {
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		select {
		case <-leased.Done():
			return nil
		case <-time.After(pause):
		}
		reply, err := t.client.Do(leased, t.inOrder())
		switch {
		case err == nil:
			now := reply.Get()
			if !t.seeAll(now.Kvs) || !t.missing(now.Kvs) {
				return nil
			}
			return t.watch(leased, now.Header.Revision)
		case errors.Is(err, rpctypes.ErrPermissionDenied):
			t.ended(fmt.Sprintf("the etcd server refuses this client: %v; see whether it may read under %q", err, t.prefix))
			return nil
		}
	}
}

// missing handles the ranks whose keys have gone, or are of another process now, while
// this client could not watch. It reports whether the group goes on.
func (t *transport) missing(now []*mvccpb.KeyValue) bool {
	there := map[string]int64{}
	for _, kv := range now {
		there[string(kv.Key)] = kv.CreateRevision
	}
	for r, m := range t.members {
		if key := t.rankKey(r); m.joined != 0 && there[key] != m.joined && !t.gone(key) {
			return false
		}
	}
	return true
}

// ended queues the end of this rank's transport.
func (t *transport) ended(why string) {
	t.put(rendezvous.Event{Kind: rendezvous.Ended, Rank: t.rank, Reason: why})
}

// put returns false if the group has ended.
func (t *transport) put(e rendezvous.Event) bool {
	select {
	case t.events <- e:
		return true
	case <-t.life.Done():
		return false
	}
}

func (t *transport) seeAll(keys []*mvccpb.KeyValue) bool {
	for _, kv := range keys {
		if !t.see(kv) {
			return false
		}
	}
	return true
}

// see handles a key that was written. What it has delivered before is not delivered again:
// the key was read again, or another client has written an old value. It reports whether
// the group goes on.
func (t *transport) see(kv *mvccpb.KeyValue) bool {
	rank, event, ok := t.parse(string(kv.Key))
	if !ok {
		return true
	}
	value, proved := open(t.secret, string(kv.Key), kv.Value)
	if event == "" {
		return t.seeRank(rank, kv.CreateRevision, string(value), proved)
	}
	e, err := readEvent(rank, t.size, event == "end", value)
	if !proved {
		err = errors.New("they do not prove the group's secret; " + sameSecret)
	}
	if err != nil {
		return t.put(rendezvous.Event{Kind: rendezvous.Lost, Rank: rank, Reason: "its keys have what no rank writes: " + err.Error()})
	}
	m := t.members[rank]
	if m == nil {
		m = &record{}
		t.members[rank] = m
	}
	if e.Kind == rendezvous.Posted {
		if e.Step.Number < m.next {
			return true
		}
		m.next = e.Step.Number + 1
	}
	if e.Rank == t.rank {
		e.Contribution = rendezvous.Contribution{}
	}
	return t.put(e)
}

// readEvent reads an event that was written as a rank's.
func readEvent(rank, size int, end bool, value []byte) (e rendezvous.Event, err error) {
	if err := e.UnmarshalBinary(value); err != nil {
		return e, err
	}
	// A rank that leaves a group that has failed writes what decided that.
	verdict := end && e.Rank >= 0 && e.Rank < size && e.Kind != rendezvous.Ended
	if end == (e.Kind == rendezvous.Posted) || e.Rank != rank && !verdict {
		return e, fmt.Errorf("an event %q of rank %d", e.Kind, e.Rank)
	}
	return e, nil
}

// seeRank handles a rank that joined, at a revision.
func (t *transport) seeRank(rank int, joined int64, size string, proved bool) bool {
	inside, same := rank < t.size, proved && size == strconv.Itoa(t.size)
	m := t.members[rank]
	switch {
	case !inside && (same || !proved):
		return true // foreign
	case same && m == nil:
		t.members[rank] = &record{joined: joined}
		return true
	case same && joined == m.joined:
		return true
	case same:
		return t.put(rendezvous.Event{Kind: rendezvous.Lost, Rank: rank, Reason: "another process took its rank"})
	}
	e := rendezvous.Event{Kind: rendezvous.Failed, Rank: rank,
		Reason: fmt.Sprintf("rank %d joined a group of %s, this one a group of %d: name the same size in all processes", rank, size, t.size)}
	if !proved {
		e.Reason = fmt.Sprintf("rank %d does not prove the group's secret; %s", rank, sameSecret)
	}
	if !inside {
		e.Kind, e.Rank = rendezvous.Ended, t.rank
	}
	return t.put(e)
}

// gone handles a key that ended: a rank's, with its lease.
func (t *transport) gone(key string) bool {
	rank, event, ok := t.parse(key)
	switch {
	case !ok || event != "" || rank >= t.size:
		return true
	case rank == t.rank:
		return t.put(rendezvous.Event{Kind: rendezvous.Ended, Rank: rank, Reason: ranOut})
	}
	return t.put(rendezvous.Event{Kind: rendezvous.Lost, Rank: rank, Reason: "its lease ended"})
}

func (t *transport) Post(ctx context.Context, s rendezvous.Step, c rendezvous.Contribution) error {
	return t.say(ctx, fmt.Sprint(s.Number%2), rendezvous.Event{Kind: rendezvous.Posted, Rank: t.rank, Step: s, Contribution: rendezvous.Contribution{Body: c.Body}})
}

func (t *transport) Fail(ctx context.Context, e rendezvous.Event) error { return t.say(ctx, "end", e) }

// say writes an event. It gives up when the group is closed, for a server that does not
// respond.
func (t *transport) say(ctx context.Context, as string, e rendezvous.Event) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(t.life, cancel)()
	return t.write(ctx, as, e, t.lease)
}

func (t *transport) write(ctx context.Context, as string, e rendezvous.Event, lease clientv3.LeaseID) error {
	value, err := e.MarshalBinary()
	if err != nil {
		return err
	}
	key := fmt.Sprintf("%sevent/%d/%s", t.prefix, t.rank, as)
	_, err = t.client.Put(ctx, key, seal(t.secret, key, value), clientv3.WithLease(lease))
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return fmt.Errorf("%s: %w", ranOut, err)
	}
	return err
}

func (t *transport) Next(ctx context.Context) (rendezvous.Event, error) {
	select {
	case e := <-t.events:
		return e, nil
	default:
	}
	select {
	case e := <-t.events:
		return e, nil
	case <-t.life.Done():
		return rendezvous.Event{}, cuda.ErrClosed
	case <-ctx.Done():
		return rendezvous.Event{}, ctx.Err()
	}
}

// Close writes that this rank leaves, and removes its keys. If ranks have yet to join,
// the end of the group stays on the server for as long as they may wait.
func (t *transport) Close(verdict *rendezvous.Event) (err error) {
	t.once.Do(func() {
		t.end()
		t.work.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), farewell)
		defer cancel()
		last := rendezvous.Event{Kind: rendezvous.Left, Rank: t.rank}
		if verdict != nil {
			last = *verdict
		}
		lease := t.lease
		if len(t.members) < t.size {
			lease, err = t.grant(ctx, t.timeout)
		}
		if err == nil {
			err = t.write(ctx, "end", last, lease)
		}
		if err = errors.Join(err, t.revoke()); err != nil {
			err = fmt.Errorf("etcd: rank %d could not say that it leaves, and counts as lost when its lease ends: %w; see whether the etcd server responds", t.rank, err)
		}
	})
	return err
}

// revoke ends the lease, and removes with it all that this rank wrote.
func (t *transport) revoke() error {
	ctx, cancel := context.WithTimeout(context.Background(), farewell)
	defer cancel()
	_, err := t.client.Revoke(ctx, t.lease)
	return err
}
