//go:build linux

package peer_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cuvmm/cuvmm/handles/peer"
	"golang.org/x/sys/unix"
)

// A server in a private directory hands out a file.
func Example() {
	ctx := context.Background()
	top, err := os.MkdirTemp("", "example")
	check(err)
	defer os.RemoveAll(top)

	server, err := peer.Listen(filepath.Join(top, "sockets"), "", peer.Options{})
	check(err)
	defer server.Close()
	served := make(chan struct{})
	go func() {
		defer close(served)
		conn, err := server.Accept(ctx)
		check(err)
		defer conn.Close()
		m, err := conn.Receive(ctx)
		check(err)
		fmt.Printf("asked for: %s\n", m.Body)
		n, err := unix.Open(os.DevNull, unix.O_RDONLY, 0)
		check(err)
		f, err := peer.NewFD(n)
		check(err)
		defer f.Close()
		check(conn.Send(ctx, peer.Message{Kind: 2, FDs: []*peer.FD{f}}))
		_, _ = conn.Receive(ctx) // until the client is gone
	}()

	client, err := peer.Dial(ctx, server.Path(), peer.Options{})
	check(err)
	defer func() {
		client.Close()
		<-served
	}()
	check(client.Send(ctx, peer.Message{Kind: 1, Body: []byte("a file")}))
	m, err := client.Receive(ctx)
	check(err)
	defer m.Close()
	fmt.Printf("got %d\n", len(m.FDs))
	// Output:
	// asked for: a file
	// got 1
}

// A client may start before its server.
func ExampleDialWait() {
	dir, err := os.MkdirTemp("", "example")
	check(err)
	defer os.RemoveAll(dir)
	dialed := make(chan error, 1)
	go func() {
		conn, err := peer.DialWait(context.Background(), filepath.Join(dir, "sockets", "server"), peer.Options{})
		if err == nil {
			err = conn.Close()
		}
		dialed <- err
	}()
	server, err := peer.Listen(filepath.Join(dir, "sockets"), "server", peer.Options{})
	check(err)
	defer server.Close()
	conn, err := server.Accept(context.Background())
	check(err)
	defer conn.Close()
	fmt.Println(<-dialed)
	// Output: <nil>
}

// A process that was restarted finds its socket served by the process that took over
// meanwhile, and learns which one that is.
func ExampleServedError() {
	dir, err := os.MkdirTemp("", "example")
	check(err)
	defer os.RemoveAll(dir)
	successor, err := peer.Listen(dir, "server", peer.Options{})
	check(err)
	defer successor.Close()

	_, err = peer.Listen(dir, "server", peer.Options{})
	var served *peer.ServedError
	if errors.As(err, &served) {
		fmt.Println("superseded:", served.By.PID == os.Getpid(), filepath.Base(served.Path))
	}
	// Output: superseded: true server
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// A parent makes the socket, and a child accepts on it: when the child is replaced, peers that connect
// meanwhile wait for the next one.
func ExampleInheritListener() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	l, err := peer.Listen(filepath.Join(dir, "sockets"), "server", peer.Options{})
	if err != nil {
		panic(err)
	}
	defer l.Close()
	file, err := l.File() // for the child's exec.Cmd.ExtraFiles
	if err != nil {
		panic(err)
	}
	child, err := peer.InheritListener(file, peer.Options{}) // in the child: os.NewFile(3, "socket")
	if err != nil {
		panic(err)
	}
	defer child.Close()
	go func() {
		if c, err := peer.Dial(context.Background(), l.Path(), peer.Options{}); err == nil {
			defer c.Close()
			_ = c.Send(context.Background(), peer.Message{Kind: 1, Body: []byte("hello")})
		}
	}()
	c, err := child.Accept(context.Background())
	if err != nil {
		panic(err)
	}
	defer c.Close()
	m, err := c.Receive(context.Background())
	if err != nil {
		panic(err)
	}
	fmt.Println(string(m.Body))
	// Output: hello
}
