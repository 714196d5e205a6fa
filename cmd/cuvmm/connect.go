package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// errNoBroker: no process serves the socket.
var errNoBroker = errors.New("no broker serves")

// connect connects to the broker at a socket. Its errors say what to do in a shell.
func connect(ctx context.Context, h host, path string) (*broker.Client, error) {
	k, err := broker.Dial(ctx, path, broker.DialOptions{})
	var served *peer.ServedError
	switch where := errs.Plain(path); {
	case errors.Is(err, peer.ErrGone), errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w %s: start one with cuvmm serve, or name another with -socket", errNoBroker, where)
	case errors.As(err, &served):
		return nil, fmt.Errorf("the broker at %s does not reply: %s", where, whoStandsStill(h, served.By.PID))
	}
	return k, err
}

// whoStandsStill says why a broker does not reply whose socket a process listens at: that is the keeper, and the broker
// its child.
func whoStandsStill(h host, listens int) string {
	if listens == 0 {
		return "see what it does, in the container that it is in"
	}
	for _, name := range h.names("proc") {
		stat := h.text("proc/" + name + "/stat")
		at := strings.LastIndex(stat, ") ") // behind the name, which may have anything in it
		if at < 0 {
			continue
		}
		of := strings.Fields(stat[at+2:])
		if own := strconv.Itoa(listens); of[0] == "T" && (name == own || of[1] == own && listens != 1) { // the first process adopts orphans
			return fmt.Sprintf("process %s (%s) is stopped; have it go on with kill -CONT %[1]s", name, h.text("proc/"+name+"/comm"))
		}
	}
	return fmt.Sprintf("see what process %d (%s) does, or the broker that it started", listens, h.text(fmt.Sprintf("proc/%d/comm", listens)))
}
