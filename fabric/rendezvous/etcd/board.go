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
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// DefaultPrefix is under which key groups are kept where nothing else is said.
const DefaultPrefix = "/cuvmm/rendezvous/"

// DefaultTTL is how long after its end a rank counts as lost.
const DefaultTTL = 5 * time.Second

// farewell is how long a rank that leaves tries to say so.
const farewell = time.Second

// Options describe a group over etcd. The zero value works.
type Options struct {
	rendezvous.Options
	// Prefix of all keys; empty is DefaultPrefix.
	Prefix string
	// TTL is how long a rank's lease lasts without a sign of life, in whole
	// seconds: a rank that dies counts as lost after that. A server may make it
	// longer, by some election timeouts. 0 is DefaultTTL.
	TTL time.Duration
}

// Join enters a group as one of its ranks, within Options.Timeout. All ranks name
// the same session, which no other group uses; a new group takes a new name. A
// rank that another process has, or a session whose group has begun, is
// cuda.ErrInUse; another size than a rank before named is
// rendezvous.ErrDisagree. The client stays the caller's, who closes the group
// before it.
func Join(ctx context.Context, client *clientv3.Client, session string, rank, size int, o Options) (*rendezvous.Group, error) {
	const op = "etcd.Join"
	switch {
	case client == nil:
		return nil, fmt.Errorf("%s: %w: a nil client; make one with clientv3.New", op, cuda.ErrInvalidArgument)
	case size < 1 || size > rendezvous.MaxSize || rank < 0 || rank >= size:
		return nil, fmt.Errorf("%s: %w: rank %d of %d: a group has 1 to %d ranks, counted from 0", op, cuda.ErrInvalidArgument, rank, size, rendezvous.MaxSize)
	case session == "" || strings.Contains(session, "/"):
		return nil, fmt.Errorf("%s: %w: the session %q: name it, without a slash", op, cuda.ErrInvalidArgument, session)
	}
	if o.Prefix == "" {
		o.Prefix = DefaultPrefix
	}
	if o.TTL <= 0 {
		o.TTL = DefaultTTL
	}
	if o.Timeout <= 0 {
		o.Timeout = rendezvous.DefaultTimeout
	}
	b := &board{client: client, prefix: strings.TrimSuffix(o.Prefix, "/") + "/" + session + "/",
		rank: rank, size: size, ttl: o.TTL, timeout: o.Timeout, events: make(chan rendezvous.Event, 4*size), joined: map[int]bool{}}
	b.life, b.end = context.WithCancel(context.Background())
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	if err := b.enter(ctx); err != nil {
		b.end()
		b.work.Wait()
		return nil, fmt.Errorf("%s: session %q: %w", op, session, err)
	}
	return rendezvous.New(b, o.Options), nil
}

// board keeps, under its prefix, "rank/R" for every rank that is there, with the
// group's size, and of what rank R did "event/R/0" and "event/R/1", its latest
// arrivals at steps of an even and an odd number, and "event/R/end". Who arrives
// at a step knows that all others have done with the one before the last.
type board struct {
	client       *clientv3.Client
	prefix       string
	rank, size   int
	ttl, timeout time.Duration
	lease        clientv3.LeaseID

	events chan rendezvous.Event
	joined map[int]bool // the ranks that have ever been there; the work's alone
	life   context.Context
	end    context.CancelFunc
	work   sync.WaitGroup
	once   sync.Once

	mu   sync.Mutex
	last *rendezvous.Event // what this rank ended with
}

func (b *board) Rank() int          { return b.rank }
func (b *board) Size() int          { return b.size }
func (b *board) CarriesFiles() bool { return false }

func (b *board) rankKey(r int) string { return b.prefix + "rank/" + strconv.Itoa(r) }

// grant is a lease of a time.
func (b *board) grant(ctx context.Context, ttl time.Duration) (clientv3.LeaseID, error) {
	lease, err := b.client.Grant(ctx, int64((ttl+time.Second-1)/time.Second))
	if err != nil {
		return 0, fmt.Errorf("no lease from the etcd server: %w; see whether it runs, and that this host reaches it", err)
	}
	return lease.ID, nil
}

// enter takes the rank, and begins to listen at what was there at that moment.
func (b *board) enter(ctx context.Context) (err error) {
	if b.lease, err = b.grant(ctx, b.ttl); err != nil {
		return err
	}
	alive, err := b.client.KeepAlive(b.life, b.lease)
	if err != nil {
		return err
	}
	key, size := b.rankKey(b.rank), strconv.Itoa(b.size)
	answer, err := b.client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, size, clientv3.WithLease(b.lease)), clientv3.OpGet(b.prefix, clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByModRevision, clientv3.SortAscend))).
		Commit()
	if err != nil {
		err = fmt.Errorf("rank %d could not be written to the etcd server: %w; see whether it answers, and lets this client write under %q", b.rank, err, b.prefix)
	} else if !answer.Succeeded {
		err = fmt.Errorf("%w: rank %d is taken; %s", cuda.ErrInUse, b.rank, anotherSession)
	}
	var before []*mvccpb.KeyValue
	if err == nil {
		before = answer.Responses[1].GetResponseRange().Kvs
		err = b.fits(before)
	}
	if err != nil {
		_ = b.revoke()
		return err
	}
	// The call waits for the server.
	stop := context.AfterFunc(ctx, b.end)
	watch := b.client.Watch(clientv3.WithRequireLeader(b.life), b.prefix, clientv3.WithPrefix(), clientv3.WithRev(answer.Header.Revision+1))
	if !stop() {
		_ = b.revoke()
		return fmt.Errorf("the etcd server is not to be heard: %w; see whether it answers", ctx.Err())
	}
	b.work.Go(func() {
		for _, kv := range before {
			if !b.see(kv) {
				return
			}
		}
		b.listen(watch, alive)
	})
	return nil
}

const anotherSession = "name a session that no group has used"

// fits refuses to enter what this rank cannot have been part of: a group of
// another size, and one that has passed its first step, which nobody does without
// this rank.
func (b *board) fits(before []*mvccpb.KeyValue) error {
	for _, kv := range before {
		key := strings.TrimPrefix(string(kv.Key), b.prefix)
		if r, ok := strings.CutPrefix(key, "rank/"); ok && string(kv.Value) != strconv.Itoa(b.size) {
			return fmt.Errorf("%w: rank %s has joined a group of %s, this one would a group of %d; name the same size in all processes", rendezvous.ErrDisagree, r, kv.Value, b.size)
		}
		var e rendezvous.Event
		if strings.HasPrefix(key, "event/") && e.UnmarshalBinary(kv.Value) == nil && e.Kind == rendezvous.Posted && e.Step.Number > 0 {
			return fmt.Errorf("%w: rank %d is at step %d already, of a group that had another as rank %d; %s", cuda.ErrInUse, e.Rank, e.Step.Number, b.rank, anotherSession)
		}
	}
	return nil
}

// listen hands on what the others do, until the group ends.
func (b *board) listen(watch clientv3.WatchChan, alive <-chan *clientv3.LeaseKeepAliveResponse) {
	ended := func(why string) {
		b.put(rendezvous.Event{Kind: rendezvous.Ended, Rank: b.rank, Reason: why})
	}
	for {
		select {
		case <-b.life.Done():
			return
		case _, ok := <-alive:
			if !ok && b.life.Err() == nil {
				ended(ranOut)
				return
			}
		case changes, ok := <-watch:
			if err := changes.Err(); !ok || err != nil {
				if err == nil {
					err = errors.New("the client was closed: close the group before it")
				}
				if b.life.Err() == nil {
					ended(fmt.Sprintf("the etcd server is not to be heard any more: %v", err))
				}
				return
			}
			for _, c := range changes.Events {
				if c.Type == mvccpb.DELETE && !b.gone(string(c.Kv.Key)) || c.Type == mvccpb.PUT && !b.see(c.Kv) {
					return
				}
			}
		}
	}
}

const ranOut = "this rank's lease ran out: it did not reach the etcd server for too long; see what held it up, or raise Options.TTL"

// put answers false where the group has ended.
func (b *board) put(e rendezvous.Event) bool {
	select {
	case b.events <- e:
		return true
	case <-b.life.Done():
		return false
	}
}

// see takes in a key that was written.
func (b *board) see(kv *mvccpb.KeyValue) bool {
	key := strings.TrimPrefix(string(kv.Key), b.prefix)
	if r, ok := strings.CutPrefix(key, "rank/"); ok {
		rank, err := strconv.Atoi(r)
		inside := rank >= 0 && rank < b.size
		e := rendezvous.Event{Kind: rendezvous.Failed, Rank: rank,
			Reason: fmt.Sprintf("rank %d joined a group of %s, this one a group of %d: name the same size in all processes", rank, kv.Value, b.size)}
		switch same := string(kv.Value) == strconv.Itoa(b.size); {
		case err != nil || same && !inside:
			return true // nothing of a group's
		case same:
			b.joined[rank] = true
			return true
		case !inside:
			e.Kind, e.Rank = rendezvous.Ended, b.rank
		}
		return b.put(e)
	}
	from, _, _ := strings.Cut(strings.TrimPrefix(key, "event/"), "/")
	rank, err := strconv.Atoi(from)
	if err != nil || rank == b.rank || rank < 0 || rank >= b.size {
		return true // nothing of this group's
	}
	b.joined[rank] = true
	var e rendezvous.Event
	if err := e.UnmarshalBinary(kv.Value); err != nil {
		e = rendezvous.Event{Kind: rendezvous.Lost, Reason: "it wrote what no rank writes: " + err.Error()}
	}
	e.Rank = rank
	return b.put(e)
}

// gone takes in a key that ended: a rank's, with its lease.
func (b *board) gone(key string) bool {
	r, ok := strings.CutPrefix(key, b.prefix+"rank/")
	rank, err := strconv.Atoi(r)
	switch {
	case !ok || err != nil || rank < 0 || rank >= b.size:
		return true
	case rank == b.rank:
		return b.put(rendezvous.Event{Kind: rendezvous.Ended, Rank: rank, Reason: ranOut})
	}
	return b.put(rendezvous.Event{Kind: rendezvous.Lost, Rank: rank, Reason: "its lease ended"})
}

func (b *board) Post(ctx context.Context, s rendezvous.Step, p rendezvous.Parcel) error {
	return b.say(ctx, fmt.Sprint(s.Number%2), rendezvous.Event{Kind: rendezvous.Posted, Rank: b.rank, Step: s, Parcel: rendezvous.Parcel{Body: p.Body}})
}

func (b *board) Fail(ctx context.Context, s rendezvous.Step, reason string) error {
	e := rendezvous.Event{Kind: rendezvous.Failed, Rank: b.rank, Step: s, Reason: reason}
	b.mu.Lock()
	b.last = &e
	b.mu.Unlock()
	return b.say(ctx, "end", e)
}

// say writes until the group is closed, though the server may not answer.
func (b *board) say(ctx context.Context, as string, e rendezvous.Event) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(b.life, cancel)()
	return b.write(ctx, as, e, b.lease)
}

func (b *board) write(ctx context.Context, as string, e rendezvous.Event, lease clientv3.LeaseID) error {
	value, err := e.MarshalBinary()
	if err != nil {
		return err
	}
	_, err = b.client.Put(ctx, fmt.Sprintf("%sevent/%d/%s", b.prefix, b.rank, as), string(value), clientv3.WithLease(lease))
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return fmt.Errorf("%s: %w", ranOut, err)
	}
	return err
}

func (b *board) Next(ctx context.Context) (rendezvous.Event, error) {
	select {
	case e := <-b.events:
		return e, nil
	default:
	}
	select {
	case e := <-b.events:
		return e, nil
	case <-b.life.Done():
		return rendezvous.Event{}, cuda.ErrClosed
	case <-ctx.Done():
		return rendezvous.Event{}, ctx.Err()
	}
}

// Close says that this rank leaves, and takes its keys away. Where some have yet
// to join, what it ended with stays for them for as long as they wait.
func (b *board) Close() (err error) {
	b.once.Do(func() {
		b.end()
		b.work.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), farewell)
		defer cancel()
		b.mu.Lock()
		last := rendezvous.Event{Kind: rendezvous.Left, Rank: b.rank}
		if b.last != nil {
			last = *b.last
		}
		b.mu.Unlock()
		lease := b.lease
		if len(b.joined) < b.size {
			lease, err = b.grant(ctx, b.timeout)
		}
		if err == nil {
			err = b.write(ctx, "end", last, lease)
		}
		if err = errors.Join(err, b.revoke()); err != nil {
			err = fmt.Errorf("etcd: rank %d could not say that it leaves, and counts as lost when its lease ends: %w; see whether the etcd server answers", b.rank, err)
		}
	})
	return err
}

// revoke ends the lease, and with it all that this rank wrote.
func (b *board) revoke() error {
	ctx, cancel := context.WithTimeout(context.Background(), farewell)
	defer cancel()
	_, err := b.client.Revoke(ctx, b.lease)
	return err
}
