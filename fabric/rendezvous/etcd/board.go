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

// Join enters a group as one of its ranks. All ranks name the same session,
// which no other group uses; a new group takes a new name. The client stays the
// caller's, who closes the group before it.
func Join(ctx context.Context, client *clientv3.Client, session string, rank, size int, o Options) (*rendezvous.Group, error) {
	const op = "etcd.Join"
	switch {
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
	b := &board{client: client, session: session, prefix: strings.TrimSuffix(o.Prefix, "/") + "/" + session + "/",
		rank: rank, size: size, events: make(chan rendezvous.Event, 4*size)}
	b.life, b.end = context.WithCancel(context.Background())
	if err := b.enter(ctx, o.TTL); err != nil {
		b.end()
		b.work.Wait()
		return nil, fmt.Errorf("%s: session %q: %w", op, session, err)
	}
	return rendezvous.New(b, o.Options), nil
}

// board keeps, under its prefix, "rank/R" for every rank that is there, with the
// group's size, and "event/R/N" for the Nth thing that rank R did.
type board struct {
	client     *clientv3.Client
	session    string
	prefix     string
	rank, size int
	lease      clientv3.LeaseID
	next       int // of this rank's events

	events chan rendezvous.Event
	life   context.Context
	end    context.CancelFunc
	work   sync.WaitGroup
	once   sync.Once
}

func (b *board) Rank() int          { return b.rank }
func (b *board) Size() int          { return b.size }
func (b *board) CarriesFiles() bool { return false }

func (b *board) rankKey(r int) string { return b.prefix + "rank/" + strconv.Itoa(r) }

// enter takes the rank, and begins to listen at what was there at that moment.
func (b *board) enter(ctx context.Context, ttl time.Duration) error {
	lease, err := b.client.Grant(ctx, int64((ttl+time.Second-1)/time.Second))
	if err != nil {
		return fmt.Errorf("no lease from the etcd server: %w; see whether it runs, and that this host reaches it", err)
	}
	b.lease = lease.ID
	alive, err := b.client.KeepAlive(b.life, b.lease)
	if err != nil {
		return err
	}
	key, size := b.rankKey(b.rank), strconv.Itoa(b.size)
	answer, err := b.client.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, size, clientv3.WithLease(b.lease)), clientv3.OpGet(b.prefix, clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByModRevision, clientv3.SortAscend))).
		Commit()
	if err == nil && !answer.Succeeded {
		err = fmt.Errorf("%w: rank %d is taken; name a session that no group has used", cuda.ErrInUse, b.rank)
	}
	if err != nil {
		_ = b.revoke()
		return err
	}
	watch := b.client.Watch(clientv3.WithRequireLeader(b.life), b.prefix, clientv3.WithPrefix(), clientv3.WithRev(answer.Header.Revision+1))
	before := answer.Responses[1].GetResponseRange().Kvs
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
				ended("this rank's lease ran out: the etcd server was not to be reached for too long")
				return
			}
		case changes, ok := <-watch:
			if err := changes.Err(); !ok || err != nil {
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
		if size, err := strconv.Atoi(string(kv.Value)); err != nil || size != b.size {
			return b.put(rendezvous.Event{Kind: rendezvous.Ended, Rank: b.rank,
				Reason: fmt.Sprintf("rank %s joined a group of %s, this one a group of %d", r, kv.Value, b.size)})
		}
		return true
	}
	from, _, _ := strings.Cut(strings.TrimPrefix(key, "event/"), "/")
	rank, err := strconv.Atoi(from)
	if err != nil || rank == b.rank || rank < 0 || rank >= b.size {
		return true // nothing of this group's
	}
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
	if !ok || err != nil || rank == b.rank || rank < 0 || rank >= b.size {
		return true
	}
	return b.put(rendezvous.Event{Kind: rendezvous.Lost, Rank: rank, Reason: "its lease ended"})
}

func (b *board) Post(ctx context.Context, s rendezvous.Step, p rendezvous.Parcel) error {
	return b.write(ctx, rendezvous.Event{Kind: rendezvous.Posted, Rank: b.rank, Step: s, Parcel: rendezvous.Parcel{Body: p.Body}})
}

func (b *board) Fail(ctx context.Context, s rendezvous.Step, reason string) error {
	return b.write(ctx, rendezvous.Event{Kind: rendezvous.Failed, Rank: b.rank, Step: s, Reason: reason})
}

func (b *board) write(ctx context.Context, e rendezvous.Event) error {
	value, err := e.MarshalBinary()
	if err != nil {
		return err
	}
	key := fmt.Sprintf("%sevent/%d/%d", b.prefix, b.rank, b.next)
	b.next++
	_, err = b.client.Put(ctx, key, string(value), clientv3.WithLease(b.lease))
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

// Close says that this rank leaves, and takes its keys away.
func (b *board) Close() (err error) {
	b.once.Do(func() {
		b.end()
		b.work.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), farewell)
		defer cancel()
		value, _ := rendezvous.Event{Kind: rendezvous.Left, Rank: b.rank}.MarshalBinary()
		_, err = b.client.Put(ctx, fmt.Sprintf("%sevent/%d/left", b.prefix, b.rank), string(value), clientv3.WithLease(b.lease))
		err = errors.Join(err, b.revoke())
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
