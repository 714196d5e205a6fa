package etcd

import (
	"bytes"
	"context"
	"crypto/ed25519"
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
	t, err := newTransport(client, session, rank, size, o)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	if err := t.enter(ctx); err != nil {
		t.end()
		t.work.Wait()
		return nil, fmt.Errorf("%s: session %q: %w", op, session, err)
	}
	return rendezvous.New(t, o.Options), nil
}

func newTransport(client *clientv3.Client, session string, rank, size int, o Options) (*transport, error) {
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		return nil, err
	}
	t := &transport{client: client, prefix: strings.TrimSuffix(o.Prefix, "/") + "/" + session + "/",
		rank: rank, size: size, ttl: o.TTL, timeout: o.Timeout, secret: o.Secret, public: public, private: private,
		events: make(chan rendezvous.Event, 4*size), joined: map[int]ed25519.PublicKey{}}
	t.life, t.end = context.WithCancel(context.Background())
	return t, nil
}

// transport keeps, under its prefix, "rank/R" for every rank that is present, with the
// public key of its process and the group's size, and of what rank R did "event/R/0" and
// "event/R/1", its latest arrivals at steps of an even and an odd number, and
// "event/R/end". Rank R signs its events. A rank that arrives at a step shows that no rank
// needs the step before the last.
type transport struct {
	client       *clientv3.Client
	prefix       string
	rank, size   int
	ttl, timeout time.Duration
	lease        clientv3.LeaseID

	events chan rendezvous.Event
	// joined are the public keys of all ranks that have ever joined; nil of one that had
	// left before this rank joined. It is the work's alone.
	joined map[int]ed25519.PublicKey
	life   context.Context
	end    context.CancelFunc
	work   sync.WaitGroup
	once   sync.Once

	secret  rendezvous.Secret
	public  ed25519.PublicKey
	private ed25519.PrivateKey
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
	me := seal(t.secret, key, strconv.AppendInt(bytes.Clone(t.public), int64(t.size), 10))
	reply, err := t.client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, me, clientv3.WithLease(t.lease)), clientv3.OpGet(t.prefix, clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByModRevision, clientv3.SortAscend))).
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
	watch := t.client.Watch(clientv3.WithRequireLeader(t.life), t.prefix, clientv3.WithPrefix(), clientv3.WithRev(reply.Header.Revision+1))
	if !stop() {
		_ = t.revoke()
		return fmt.Errorf("the etcd server does not respond: %w; see whether it runs and is reachable", ctx.Err())
	}
	t.work.Go(func() {
		for _, kv := range before {
			if !t.see(kv, true) {
				return
			}
		}
		t.listen(watch, alive)
	})
	return nil
}

const anotherSession = "name a session that no group has used"

// fits returns an error for a group that this rank cannot be part of: one of another
// size, or one that has passed its first step, which takes every rank.
func (t *transport) fits(before []*mvccpb.KeyValue) error {
	for _, kv := range before {
		value, ok := open(t.secret, string(kv.Key), kv.Value)
		if !ok {
			return fmt.Errorf("%w: key %q was written without this rank's secret; %s", peer.ErrPeer, kv.Key, sameSecret)
		}
		key := strings.TrimPrefix(string(kv.Key), t.prefix)
		if r, ok := strings.CutPrefix(key, "rank/"); ok {
			if _, size := readRank(value); size != strconv.Itoa(t.size) {
				return fmt.Errorf("%w: rank %s has joined a group of %s, this one would a group of %d; name the same size in all processes", rendezvous.ErrDisagree, r, size, t.size)
			}
		}
		var e rendezvous.Event
		value, _ = signed(nil, "", value) // see checks the signature
		if strings.HasPrefix(key, "event/") && e.UnmarshalBinary(value) == nil && e.Kind == rendezvous.Posted && e.Step.Number > 0 {
			return fmt.Errorf("%w: rank %d is at step %d already, of a group that had another as rank %d; %s", cuda.ErrInUse, e.Rank, e.Step.Number, t.rank, anotherSession)
		}
	}
	return nil
}

// readRank returns the public key of a rank, and the size of its group.
func readRank(value []byte) (public ed25519.PublicKey, size string) {
	n := min(len(value), ed25519.PublicKeySize)
	return ed25519.PublicKey(value[:n]), string(value[n:])
}

const sameSecret = "give all ranks the same Options.Secret"

// listen delivers the other ranks' events, until the group ends.
func (t *transport) listen(watch clientv3.WatchChan, alive <-chan *clientv3.LeaseKeepAliveResponse) {
	ended := func(why string) {
		t.put(rendezvous.Event{Kind: rendezvous.Ended, Rank: t.rank, Reason: why})
	}
	for {
		select {
		case <-t.life.Done():
			return
		case _, ok := <-alive:
			if !ok && t.life.Err() == nil {
				ended(ranOut)
				return
			}
		case changes, ok := <-watch:
			if err := changes.Err(); !ok || err != nil {
				if err == nil {
					err = errors.New("the client was closed: close the group before it")
				}
				if t.life.Err() == nil {
					ended(fmt.Sprintf("the etcd server no longer responds: %v", err))
				}
				return
			}
			for _, c := range changes.Events {
				if c.Type == mvccpb.DELETE && !t.gone(string(c.Kv.Key)) || c.Type == mvccpb.PUT && !t.see(c.Kv, false) {
					return
				}
			}
		}
	}
}

const ranOut = "this rank's lease ran out: it did not reach the etcd server for too long; see what held it up, or raise Options.TTL"

// put returns false if the group has ended.
func (t *transport) put(e rendezvous.Event) bool {
	select {
	case t.events <- e:
		return true
	case <-t.life.Done():
		return false
	}
}

// see handles a key that was written, before this rank joined or since. It reports whether
// the group goes on.
func (t *transport) see(kv *mvccpb.KeyValue, before bool) bool {
	key := strings.TrimPrefix(string(kv.Key), t.prefix)
	value, proved := open(t.secret, string(kv.Key), kv.Value)
	if r, ok := strings.CutPrefix(key, "rank/"); ok {
		return t.seeRank(r, value, proved)
	}
	rest, ok := strings.CutPrefix(key, "event/")
	from, as, _ := strings.Cut(rest, "/")
	rank, err := strconv.Atoi(from)
	if !ok || err != nil || rank < 0 || rank >= t.size {
		return true // not of this group
	}
	e, err := t.readEvent(string(kv.Key), rank, as == "end", before, value)
	if err == nil && !proved {
		err = errors.New("it does not prove the group's secret; " + sameSecret)
	}
	if err != nil {
		e = rendezvous.Event{Kind: rendezvous.Lost, Rank: rank, Reason: "its keys have what no rank writes: " + err.Error()}
	}
	if e.Rank == t.rank {
		e.Contribution = rendezvous.Contribution{}
	}
	return t.put(e)
}

// readEvent reads an event under a rank's key, which the rank's process must have signed.
// Only the end of a rank that had left before this one joined cannot be checked, because
// its public key has gone with it.
func (t *transport) readEvent(key string, rank int, end, before bool, value []byte) (e rendezvous.Event, err error) {
	public, known := t.joined[rank]
	value, ok := signed(public, key, value)
	if err := e.UnmarshalBinary(value); err != nil {
		return e, err
	}
	left := end && before && public == nil
	if !ok && !left {
		return e, fmt.Errorf("an event that another process than rank %d signed", rank)
	}
	inside := e.Rank >= 0 && e.Rank < t.size
	// A rank that leaves a group that has failed writes what decided that.
	verdict := end && inside && e.Kind != rendezvous.Ended
	if end == (e.Kind == rendezvous.Posted) || e.Rank != rank && !verdict {
		return e, fmt.Errorf("an event %q of rank %d", e.Kind, e.Rank)
	}
	if !known {
		t.joined[rank] = nil
	}
	return e, nil
}

// seeRank handles a rank that joined.
func (t *transport) seeRank(r string, value []byte, proved bool) bool {
	rank, err := strconv.Atoi(r)
	inside := rank >= 0 && rank < t.size
	public, size := readRank(value)
	same := proved && size == strconv.Itoa(t.size)
	before, known := t.joined[rank]
	switch {
	case err != nil || !inside && (same || !proved):
		return true // not of this group
	case same && !known:
		t.joined[rank] = public
		return true
	case same && before.Equal(public):
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
	r, ok := strings.CutPrefix(key, t.prefix+"rank/")
	rank, err := strconv.Atoi(r)
	switch {
	case !ok || err != nil || rank < 0 || rank >= t.size:
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
	_, err = t.client.Put(ctx, key, seal(t.secret, key, sign(t.private, key, value)), clientv3.WithLease(lease))
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
		if len(t.joined) < t.size {
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
