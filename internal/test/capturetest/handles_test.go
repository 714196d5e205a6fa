package capturetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

var handlesCases = join(
	plain("Kind", func(*world) handles.Kind { return handles.ArrayKind }, "String"),
	plain("ElementType", func(*world) handles.ElementType { return handles.Float32 }, "String"),
	plain("Process", func(*world) handles.Process { return handles.Self() }, "String"),
	plain("Descriptor", (*world).descriptor, "Size", "MarshalBinary"),
	table{
		"Self":      nothing(func() any { return handles.Self() }),
		"ElementOf": nothing(func() any { e, _ := handles.ElementOf[float32](); return e }),
		"Descriptor.Validate": func(w *world) func() error {
			d := w.descriptor()
			return func() error { return d.Validate(handles.Limits{Granularity: 2 * mib, MaxBytes: mib << 10}) }
		},
		"Descriptor.UnmarshalBinary": func(w *world) func() error {
			b := must[[]byte](w)(w.descriptor().MarshalBinary())
			return func() error { return new(handles.Descriptor).UnmarshalBinary(b) }
		},
	},
	sharingCases, leaseCases,
)

func (w *world) descriptor() *handles.Descriptor {
	return &handles.Descriptor{Kind: handles.BufferKind, Length: 5, Chunks: []int{2 * mib},
		Location: cuda.OnDevice(0), Device: cuda.UUID{1}, Handle: vmm.PosixFD}
}

var peerCases = join(
	plain("Credentials", func(*world) peer.Credentials { return peer.Credentials{} }, "String"),
	plain("Error", func(*world) *peer.Error { return &peer.Error{Op: "op"} }, "Error", "Unwrap"),
	plain("ServedError", func(*world) *peer.ServedError { return &peer.ServedError{} }, "Error"),
	table{
		"OpenFDs":  nothing(func() any { return peer.OpenFDs() }),
		"LostFDs":  nothing(func() any { return peer.LostFDs() }),
		"TraceFDs": nothing(func() any { peer.TraceFDs(nil); return nil }),
		"CloseAll": func(w *world) func() error {
			all := []*peer.FD{w.fd(), nil}
			return func() error { return peer.CloseAll(all) }
		},
	},
	plain("FD", (*world).fd, "String", "Released", "Close"),
	plain("Listener", (*world).listener, "Path", "Released", "Close"),
	plain("Message", func(w *world) *peer.Message { return &peer.Message{FDs: []*peer.FD{w.fd()}} }, "Close"),
	table{
		"NewFD": func(w *world) func() error {
			n := w.number()
			return func() error { return keep[*peer.FD](w)(peer.NewFD(n)) }
		},
		"FD.Dup": func(w *world) func() error {
			f := w.fd()
			return func() error { return keep[*peer.FD](w)(f.Dup()) }
		},
		"FD.File": func(w *world) func() error {
			f := w.fd()
			return func() error {
				file, err := f.File("name")
				if err != nil {
					return err
				}
				return file.Close()
			}
		},
		"FD.Use": func(w *world) func() error {
			f := w.fd()
			return func() error { return f.Use(func(int) error { return nil }) }
		},
		"Listen": func(w *world) func() error {
			dir := filepath.Join(w.TempDir(), "d")
			return func() error {
				return keep[*peer.Listener](w)(peer.Listen(dir, "", peer.Options{}))
			}
		},
		"Listener.Accept": func(w *world) func() error { return beside(w.meeting(peer.Dial)) },
		"Dial": func(w *world) func() error {
			accept, dial := w.meeting(peer.Dial)
			return beside(dial, accept)
		},
		"DialWait": func(w *world) func() error {
			accept, dial := w.meeting(peer.DialWait)
			return beside(dial, accept)
		},
		"Pair": func(w *world) func() error {
			return func() error {
				c, f, err := peer.Pair(peer.Options{})
				if err != nil {
					return err
				}
				return errors.Join(c.Close(), f.Close())
			}
		},
		"Inherit": func(w *world) func() error {
			c, f, err := peer.Pair(peer.Options{})
			require.NoError(w, err)
			w.closed(c)
			return func() error { return keep[*peer.Conn](w)(peer.Inherit(f, peer.Options{})) }
		},
		"Conn.Peer": func(w *world) func() error {
			near, _ := w.pair()
			return func() error { near.Peer(); return nil }
		},
		"Conn.Released": func(w *world) func() error {
			near, _ := w.pair()
			return func() error { near.Released(); return nil }
		},
		"Conn.Close": func(w *world) func() error {
			near, _ := w.pair()
			return near.Close
		},
		"Conn.Send": func(w *world) func() error {
			near, far := w.pair()
			return beside(func() error { return near.Send(w.soon(), peer.Message{Kind: 1}) },
				func() error { _, err := far.Receive(w.soon()); return err })
		},
		"Conn.Receive": func(w *world) func() error {
			near, far := w.pair()
			return beside(func() error { _, err := far.Receive(w.soon()); return err },
				func() error { return near.Send(w.soon(), peer.Message{Kind: 1}) })
		},
	},
)

var sharingCases = table{
	"SendBuffer":    shares(sendBuffer, receiveBuffer, true),
	"ReceiveBuffer": shares(sendBuffer, receiveBuffer, false),
	"SendArray":     shares(sendArray, receiveArray, true),
	"ReceiveArray":  shares(sendArray, receiveArray, false),
}

// shares has one side be the operation, and the other go on beside it.
func shares(send func(w *world, c *peer.Conn) func() error, receive func(w *world, c *peer.Conn) (io.Closer, error), sends bool) operation {
	return func(w *world) func() error {
		near, far := w.pair()
		sender := send(w, near)
		receiver := func() error { return keep[io.Closer](w)(receive(w, far)) }
		if sends {
			return beside(sender, receiver)
		}
		return beside(receiver, sender)
	}
}

func sendBuffer(w *world, c *peer.Conn) func() error {
	b := w.buffer()
	return func() error { return handles.SendBuffer(w.soon(), c, b) }
}

func receiveBuffer(w *world, c *peer.Conn) (io.Closer, error) {
	return handles.ReceiveBuffer(w.soon(), c, w.dev, handles.ImportOptions{})
}

func sendArray(w *world, c *peer.Conn) func() error {
	a := w.array()
	return func() error { return handles.SendArray(w.soon(), c, a) }
}

func receiveArray(w *world, c *peer.Conn) (io.Closer, error) {
	return handles.ReceiveArray[int32](w.soon(), c, w.dev, handles.ImportOptions{ReadOnly: true})
}

var publishCases = join(
	plain("Access", func(*world) publish.Access { return publish.ReadAccess }, "String"),
	plain("Publication", (*world).publication, "Name", "Stats", "Released", "Withdraw"),
	plain("Follower", (*world).follower, "Array", "Len", "Generation", "State", "Err", "Released", "Close"),
	plain("State", func(*world) publish.State { return publish.Live }, "String"),
	table{
		"NewServer": func(w *world) func() error {
			return func() error { return keep[*publish.Server](w)(publish.NewServer(publish.ServerOptions{}), nil) }
		},
		"Server.Serve": func(w *world) func() error {
			s, l := w.server(), w.listener()
			return func() error {
				ctx, cancel := context.WithTimeout(w.Context(), 10*time.Millisecond)
				defer cancel()
				return s.Serve(ctx, l)
			}
		},
		"Server.ServeConn": func(w *world) func() error {
			s := w.server()
			near, far := w.pair()
			return beside(func() error { return s.ServeConn(w.soon(), near) }, far.Close)
		},
		"Server.Released": func(w *world) func() error {
			s := w.server()
			return func() error { s.Released(); return nil }
		},
		"Server.Close": func(w *world) func() error { return w.server().Close },
		"Server.Publish": func(w *world) func() error {
			s, b := w.server(), w.buffer()
			return func() error { return w.withdrawn(s.Publish("name", b)) }
		},
		"Array": func(w *world) func() error {
			s, a := w.server(), w.array()
			return func() error { return w.withdrawn(publish.Array(s, "name", a)) }
		},
		"Publication.Announce": func(w *world) func() error {
			p, s := w.publication(), w.stream()
			return func() error { return errors.Join(p.Announce(w.soon(), 3*mib, s), p.Announce(w.soon(), 4*mib, nil)) }
		},
		"Publication.AnnounceRange": func(w *world) func() error {
			p, s := w.publication(), w.stream()
			return func() error { return p.AnnounceRange(w.soon(), mib, 3*mib, s) }
		},
		"Publication.Shrink": func(w *world) func() error {
			p, s := w.publication(), w.stream()
			return func() error { return errors.Join(p.Shrink(mib, s), p.Shrink(0), w.drain()) }
		},
		"Publication.Settle": func(w *world) func() error {
			p := w.publication()
			return func() error { return p.Settle(w.soon()) }
		},
		"Publication.AwaitFollowers": func(w *world) func() error {
			p := w.publication()
			return func() error { return p.AwaitFollowers(w.soon(), 0) }
		},
		"NewClient": func(w *world) func() error {
			near, _ := w.pair()
			return func() error { return keep[*publish.Client](w)(publish.NewClient(near), nil) }
		},
		"Client.Released": func(w *world) func() error {
			_, k := w.published()
			return func() error { k.Released(); return nil }
		},
		"Dial": func(w *world) func() error { // and a follower that comes back to the next server
			b, first, second, l := w.buffer(), w.server(), w.server(), w.listener()
			go func() { _ = first.Serve(w.Context(), l) }()
			return func() error {
				k, err := publish.Dial(w.soon(), l.Path(), publish.DialOptions{ComeBack: &publish.ComeBack{First: time.Millisecond}})
				if err := keep[*publish.Client](w)(k, err); err != nil {
					return err
				}
				p, err := first.Publish("name", b)
				if err == nil {
					err = p.Announce(w.soon(), mib)
				}
				if err != nil {
					return err
				}
				f, err := publish.Follow[byte](w.soon(), k, w.dev, "name", publish.FollowOptions{})
				if err := keep[*publish.Follower[byte]](w)(f, err); err != nil {
					return err
				}
				if err := errors.Join(f.Next(w.soon()), first.Close()); err != nil {
					return err
				}
				go func() { _ = second.Serve(w.Context(), l) }()
				if p, err = second.Publish("name", b); err == nil {
					err = errors.Join(p.Announce(w.soon(), 2*mib), f.Next(w.soon()))
				}
				if err == nil && f.Len() != 2*mib {
					return fmt.Errorf("the follower has %d bytes", f.Len())
				}
				return err
			}
		},
		"TakeOver":     takesOver,
		"Client.Close": func(w *world) func() error { _, k := w.published(); return k.Close },
		"Client.List": func(w *world) func() error {
			_, k := w.published()
			return func() error { _, err := k.List(w.soon()); return err }
		},
		"Open": func(w *world) func() error {
			_, k := w.published()
			return func() error {
				return keep[*vmm.Array[byte]](w)(publish.Open[byte](w.soon(), k, w.dev, "name", handles.ImportOptions{}))
			}
		},
		"Follow": func(w *world) func() error {
			_, k := w.published()
			return func() error {
				return keep[*publish.Follower[byte]](w)(publish.Follow[byte](w.soon(), k, w.dev, "name", publish.FollowOptions{}))
			}
		},
		"Follower.Next": func(w *world) func() error {
			f, s := w.follower(), w.stream()
			return func() error { return f.Next(w.soon(), s) }
		},

		"Follower.CloseAfter": func(w *world) func() error {
			f, s := w.follower(), w.stream()
			return func() error { return errors.Join(f.CloseAfter(s), w.drain()) }
		},
		"Follower.Order": func(w *world) func() error {
			f, s := w.follower(), w.stream()
			require.NoError(w, f.Next(w.soon()))
			return func() error { return f.Order(s) }
		},
	},
)

// beside runs two sides that wait for each other, the first on the caller's
// thread.
func beside(operation, other func() error) func() error {
	return func() (err error) {
		var wg sync.WaitGroup
		var there error
		wg.Go(func() { there = other() })
		err = operation()
		wg.Wait()
		return errors.Join(err, there)
	}
}

// soon bounds what waits for the other side.
func (w *world) soon() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	w.Cleanup(cancel)
	return ctx
}

// fd owns a descriptor of the null device.
func (w *world) fd() *peer.FD { return made[*peer.FD](w)(peer.NewFD(w.number())) }

func (w *world) number() int {
	n, err := syscall.Open(os.DevNull, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	require.NoError(w, err)
	return int(n) // on Windows it is another type, and the test does not run
}

// meeting is the two sides of a connection over a socket.
func (w *world) meeting(of func(context.Context, string, peer.Options) (*peer.Conn, error)) (accept, dial func() error) {
	l := w.listener()
	return func() error { return keep[*peer.Conn](w)(l.Accept(w.soon())) },
		func() error { return keep[*peer.Conn](w)(of(w.soon(), l.Path(), peer.Options{})) }
}

func (w *world) listener() *peer.Listener {
	return made[*peer.Listener](w)(peer.Listen(filepath.Join(w.TempDir(), "d"), "", peer.Options{}))
}

func (w *world) pair() (near, far *peer.Conn) {
	near, f, err := peer.Pair(peer.Options{})
	require.NoError(w, err)
	w.closed(near)
	return near, made[*peer.Conn](w)(peer.Inherit(f, peer.Options{}))
}

func (w *world) server() *publish.Server {
	return made[*publish.Server](w)(publish.NewServer(publish.ServerOptions{}), nil)
}

// withdrawn keeps what is published.
func (w *world) withdrawn(p *publish.Publication, err error) error {
	if err == nil {
		w.Cleanup(func() { require.NoError(w, p.Withdraw()) })
	}
	return err
}

// published is a buffer of which 2 MiB were announced, and a client that may
// follow it.
func (w *world) published() (*publish.Publication, *publish.Client) {
	b, s := w.buffer(), w.server()
	p := must[*publish.Publication](w)(s.Publish("name", b))
	require.NoError(w, w.withdrawn(p, nil))
	require.NoError(w, p.Announce(w.soon(), 2*mib, nil))
	near, far := w.pair()
	served := make(chan error, 1)
	go func() { served <- s.ServeConn(w.soon(), near) }()
	k := publish.NewClient(far)
	w.Cleanup(func() { require.NoError(w, <-served) })
	w.closed(k)
	return p, k
}

func (w *world) publication() *publish.Publication { p, _ := w.published(); return p }

func (w *world) follower() *publish.Follower[byte] {
	_, k := w.published()
	return made[*publish.Follower[byte]](w)(publish.Follow[byte](w.soon(), k, w.dev, "name", publish.FollowOptions{}))
}
