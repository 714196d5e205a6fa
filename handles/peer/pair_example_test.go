//go:build linux

package peer_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/cuvmm/cuvmm/handles/peer"
)

// A parent and its child have a connection of their own. The child would get the file
// as the first of exec.Cmd.ExtraFiles.
func ExamplePair() {
	parent, file, err := peer.Pair(peer.Options{})
	check(err)
	defer parent.Close()

	child, err := peer.Inherit(file, peer.Options{}) // takes the file over
	check(err)
	check(child.Send(context.Background(), peer.Message{Kind: 7, Body: []byte("ready")}))
	m, err := parent.Receive(context.Background())
	check(err)
	fmt.Printf("%d %s\n", m.Kind, m.Body)

	check(child.Close())
	_, err = parent.Receive(context.Background())
	fmt.Println(errors.Is(err, peer.ErrGone))
	var e *peer.Error
	if errors.As(err, &e) {
		fmt.Println(e.Op, "failed:", e.Hint)
	}
	// Output:
	// 7 ready
	// true
	// peer.Conn.Receive failed: connect again when it is back
}

// A listener that admits members of a group besides this user.
func ExampleCredentials() {
	const group = 4711
	o := peer.Options{Allow: func(c peer.Credentials) error {
		if c.GID == group {
			return nil
		}
		return fmt.Errorf("%v, where members of group %d are admitted", c, group)
	}}
	fmt.Println(o.Allow(peer.Credentials{PID: 1, UID: 1000, GID: 4711}))
	fmt.Println(o.Allow(peer.Credentials{PID: 1, UID: 1000, GID: 1000}))
	// Output:
	// <nil>
	// process 1 of user 1000, group 1000, where members of group 4711 are admitted
}
