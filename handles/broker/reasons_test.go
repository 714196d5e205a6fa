//go:build linux

package broker_test

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// What a broker says of a request that it denies is printed by programs in several languages: it says what to do in
// words of none.
func TestReasonsAreOfNoLanguage(t *testing.T) {
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{Limit: 64 * mib, Authorize: func(_ broker.Caller, name string) broker.Grant {
		g := broker.Grant{Access: publish.WriteAccess}
		switch name {
		case "hidden":
			g.Access = publish.NoAccess
		case "theirs":
			g.Access = publish.ReadAccess
		case "cache":
			g.EphemeralOnly = true
		case "copied":
			g.Copy = true
		case "few":
			g.Quota = broker.Quota{Bytes: mib, Counts: func(name string) bool { return name == "few" }}
		}
		return g
	}})
	k, other, ctx := h.dial(), h.dial(), peertest.Context(t)
	o := write(t, k, d, "o", mib, 1, broker.CreateOptions{})
	w, err := k.Create(ctx, d, "w", broker.CreateOptions{Bytes: mib})
	require.NoError(t, err)
	kept, err := k.Keep(ctx, d, "kept", broker.KeepOptions{Bytes: mib})
	require.NoError(t, err)
	attach := func(name string, version uint64) error {
		return gputest.Err(other.Attach(ctx, d, name, broker.AttachOptions{Version: version}))
	}
	create := func(name string, o broker.CreateOptions) error {
		o.Bytes = max(o.Bytes, 1)
		return gputest.Err(other.Create(ctx, d, name, o))
	}
	keep := func(name string, n int) error {
		return gputest.Err(other.Keep(ctx, d, name, broker.KeepOptions{Bytes: n}))
	}
	const policy = "have the broker's policy grant"
	qualified := regexp.MustCompile(`\w\.[A-Z]`)
	for _, c := range []struct {
		err, kind error
		remedy    string
	}{
		{attach("none", 0), broker.ErrUnknown, "have a process write it"},
		{attach("hidden", 0), broker.ErrUnknown, "have a process write it"},
		{attach("o", 9), broker.ErrUnknown, "attach that one"},
		{attach("w", 0), broker.ErrWriting, "wait until its writer commits it, or ends"},
		{attach("kept", 0), broker.ErrUnknown, "follow that publication"},
		{create("o", broker.CreateOptions{Alone: true}), broker.ErrExists, "attach it"},
		{create("w", broker.CreateOptions{Alone: true}), broker.ErrWriting, "wait until its writer commits it, or ends"},
		{create("kept", broker.CreateOptions{}), broker.ErrExists, "use another name, or keep it to publish it"},
		{create("theirs", broker.CreateOptions{}), cuda.ErrNotPermitted, policy},
		{create("cache", broker.CreateOptions{}), cuda.ErrNotPermitted, "make it ephemeral, or " + policy},
		{create("copied", broker.CreateOptions{}), cuda.ErrNotSupported, policy + " the name without copies"},
		{create("big", broker.CreateOptions{Bytes: 65 * mib}), broker.ErrLimit, "have that limit raised (cuvmm serve -limit)"},
		{create("few", broker.CreateOptions{Bytes: 3 * mib}), broker.ErrLimit, "have that limit raised (the policy's, or cuvmm serve -limit-per-user)"},
		{create("big", broker.CreateOptions{Bytes: 63 * mib}), broker.ErrLimit, "remove objects that are not needed"},
		{create("big", broker.CreateOptions{Bytes: 1 << 50}), cuda.ErrOutOfMemory, "divide the object among devices"},
		{keep("cache", 1), cuda.ErrNotPermitted, policy},
		{keep("o", 1), broker.ErrExists, "use another name, or remove it"},
		{keep("w", 1), broker.ErrWriting, "use another name"},
		{keep("kept", mib), broker.ErrWriting, "wait until that process closes it, or ends"},
		{keep("kept", 1), cuda.ErrInvalidArgument, "ask for the memory that there is, or remove it"},
		{other.Remove(ctx, "none", 0), broker.ErrUnknown, "see whether the name is right"},
		{other.Remove(ctx, "kept", 9), broker.ErrUnknown, "remove version 0"},
	} {
		require.ErrorIs(t, c.err, c.kind)
		own, said, _ := strings.Cut(c.err.Error(), `: the broker refused: "`)
		require.Regexp(t, `^broker\.Client\.\w+: `+c.kind.Error()+"$", own)
		require.Contains(t, said, c.remedy)
		require.NotRegexp(t, qualified, said)
	}
	closed(t, o, w, kept)
	require.NoError(t, errors.Join(k.Remove(ctx, "o", 0), k.Remove(ctx, "kept", 0)))
}

// A request that exceeds a limit by itself is told of that limit, and not of objects whose end would not help.
func TestARequestBeyondALimit(t *testing.T) {
	d := gputest.Software(t)
	h := newHouse(t, d, broker.Options{Limit: 16 * mib})
	k, ctx := h.dial(), peertest.Context(t)
	cache := write(t, k, d, "cache", mib, 1, broker.CreateOptions{Ephemeral: true})
	_, err := k.Create(ctx, d, "w", broker.CreateOptions{Bytes: 15*mib + 1})
	require.ErrorContains(t, err, `"cache", 2 MiB, is held by 1 client`)
	closed(t, cache)
	cache = write(t, k, d, "cache", mib, 1, broker.CreateOptions{Ephemeral: true})
	_, err = k.Create(ctx, d, "w", broker.CreateOptions{Bytes: 16*mib + 1}) // 18 MiB in whole granules
	require.ErrorContains(t, err, "18 MiB, where 2 MiB of 16 MiB are taken; ask for less")
	require.NotContains(t, err.Error(), "cache")
	select {
	case <-cache.Wanted():
		require.Fail(t, "it would not fit anyway")
	default:
	}
	closed(t, cache)
}

// The refusal of a device without memory says how much of it objects have, and bounds what it lists.
func TestWhoHasTheDevice(t *testing.T) {
	_, sys := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{{Memory: 64 * mib}}})
	d := sys.Devices()[0]
	h := newHouse(t, d, broker.Options{})
	k, ctx := h.dial(), peertest.Context(t)
	sizes := map[string]int{"small": 4, "smaller": 2, "large": 8, "middle": 6}
	var all []*broker.Object
	for name, n := range sizes {
		all = append(all, write(t, k, d, name, n*mib, 1, broker.CreateOptions{}))
	}
	for range 5 {
		all = append(all, attach(t, h.dial(), d, "large", broker.AttachOptions{}))
	}
	own, err := vmm.NewBuffer(d, vmm.BufferOptions{})
	require.NoError(t, err)
	require.NoError(t, own.Resize(nil, 30*mib))
	_, err = k.Create(ctx, d, "w", broker.CreateOptions{Bytes: 40 * mib})
	require.ErrorIs(t, err, cuda.ErrOutOfMemory)
	p := fmt.Sprintf("process %d of user %d", os.Getpid(), os.Geteuid())
	require.ErrorContains(t, err, fmt.Sprintf(`objects take 20 MiB of the device's 64 MiB; other programs have the rest, and cuvmm top lists them; `+
		`"large", 8 MiB, is held by 6 clients, %s, %s, %s; "middle", 6 MiB, is held by 1 client, %s; "small", 4 MiB, is held by 1 client, %s"`, p, p, p, p, p))
	for _, o := range all {
		closed(t, o)
	}
	closed(t, own)
	for name := range sizes {
		require.NoError(t, k.Remove(ctx, name, 0))
	}
}
