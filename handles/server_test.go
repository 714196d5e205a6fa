//go:build linux

package handles

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A server takes no files, so a client cannot fill its table of them.
func TestAClientCannotFillTheTableOfFiles(t *testing.T) {
	v := newVictim(t, ServerOptions{}, Options{})
	c := v.dial()
	before := OpenFDs()
	null := nullFD(t)
	var numbers []int
	for range 200 {
		numbers = append(numbers, null.s.n)
	}
	m := Message{Kind: listMessage, FDs: make([]*FD, 4096), Body: pack(&list{1}).Body}
	most := 0
	for sent := 0; sent < 4000; sent += 200 {
		p, _, _ := c.out.packet(nil, &m, min(sent, 4), sent, 200)
		if err := c.sock.Send(p, numbers); err != nil {
			break
		}
		c.out.sequence++
		time.Sleep(5 * time.Millisecond)
		most = max(most, OpenFDs()-before)
	}
	require.LessOrEqual(t, most, 300, "files of one client that the server holds")
	v.served()
}
