//go:build linux

package rendezvous

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/reexec"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/stretchr/testify/require"
)

// Only processes with the group's secret are admitted, and only by a host that has it.
func TestSecrets(t *testing.T) {
	right, wrong := Secret("0123456789abcdef"), Secret("0123456789abcdeF")
	for name, row := range map[string]struct {
		host, member Secret
		admitted     bool
	}{
		"the same":                {right, right, true},
		"none":                    {nil, nil, true},
		"another":                 {right, wrong, false},
		"none, where one is due":  {right, nil, false},
		"one, where none is due":  {nil, right, false},
		"a prefix of the other's": {right, append(right[:16:16], 0), false},
	} {
		t.Run(name, func(t *testing.T) {
			host, path, err := Host(filepath.Join(t.TempDir(), "private"), "", 2, Options{Secret: row.host})
			require.NoError(t, err)
			defer func() { require.NoError(t, host.Close()) }()
			member, err := Join(t.Context(), path, 1, 2, Options{Secret: row.member})
			if !row.admitted {
				require.ErrorIs(t, err, peer.ErrPeer)
				require.ErrorContains(t, err, "Options.Secret")
				// The rank is still free for a process that has the secret.
				member, err = Join(t.Context(), path, 1, 2, Options{Secret: row.host})
			}
			require.NoError(t, err)
			for _, err := range together([]*Group{host, member}, func(g *Group) error { return g.Barrier(t.Context(), "go") }) {
				require.NoError(t, err)
			}
			require.NoError(t, member.Close())
		})
	}
}

// A proof is good for one connection, one rank and one side.
func TestProofsAreNotReplayed(t *testing.T) {
	s := Secret("0123456789abcdef")
	h, challenge := newHello(1, 3), newNonce()
	other := func(change func(h *hello)) hello {
		h := h
		change(&h)
		return h
	}
	proof := s.proof(memberProves, h, challenge)
	require.True(t, s.proves(memberProves, h, challenge, proof))
	for name, proves := range map[string]bool{
		"another challenge":  s.proves(memberProves, h, newNonce(), proof),
		"another connection": s.proves(memberProves, newHello(1, 3), challenge, proof),
		"another rank":       s.proves(memberProves, other(func(h *hello) { h.Rank = 2 }), challenge, proof),
		"another size":       s.proves(memberProves, other(func(h *hello) { h.Size = 4 }), challenge, proof),
		"another process":    s.proves(memberProves, other(func(h *hello) { h.PID++ }), challenge, proof),
		"another namespace":  s.proves(memberProves, other(func(h *hello) { h.Namespace = 0 }), challenge, proof),
		"the other side":     s.proves(hostProves, h, challenge, proof),
		"none":               s.proves(memberProves, h, challenge, nil),
	} {
		require.False(t, proves, name)
	}
}

func init() {
	// relay stands between a host and one member, and passes on what both say.
	reexec.Register("relay", func(c *reexec.Child) error {
		l, err := peer.Listen(c.Args[1], "host", peer.Options{})
		if err != nil {
			return err
		}
		if err := c.Send(l.Path()); err != nil {
			return err
		}
		member, err := l.Accept(context.Background())
		if err != nil {
			return err
		}
		host, err := peer.Dial(context.Background(), c.Args[0], peer.Options{})
		if err != nil {
			return err
		}
		pass := func(from, to *peer.Conn) {
			for {
				m, err := from.Receive(context.Background())
				if err == nil {
					err = to.Send(context.Background(), m)
					_ = m.Close()
				}
				if err != nil {
					_ = from.Close()
					_ = to.Close()
					return
				}
			}
		}
		go pass(host, member)
		pass(member, host)
		return l.Close()
	})
}

// A process of the host's user, without the secret, cannot get between a member that has
// it and the host, and so to the memory that they share.
func TestARelayIsRefused(t *testing.T) {
	for _, s := range []Secret{Secret("0123456789abcdef"), nil} {
		folder := t.TempDir()
		host, path, err := Host(filepath.Join(folder, "private"), "", 2, Options{Secret: s})
		require.NoError(t, err)
		relay := reexec.Command(t, "relay", path, filepath.Join(folder, "relay"))
		relay.Start()
		var near string
		relay.Recv(&near)
		member, err := Join(t.Context(), near, 1, 2, Options{Secret: s})
		if s == nil { // any process of the user may join then
			require.NoError(t, err)
			require.NoError(t, member.Close())
		} else {
			require.ErrorIs(t, err, peer.ErrPeer)
			require.ErrorContains(t, err, "join at the host's own path")
		}
		require.NoError(t, host.Close())
		relay.Wait()
	}
}

// A member is compared with the process at the other end, if one namespace counts both.
func TestMembersAreComparedInOneNamespace(t *testing.T) {
	secret := Secret("0123456789abcdef")
	for name, row := range map[string]struct {
		change func(h *hello)
		reply  uint16
	}{
		"the same process":              {func(*hello) {}, wire.Welcome},
		"another process":               {func(h *hello) { h.PID++ }, wire.Relayed},
		"another namespace":             {func(h *hello) { h.PID, h.Namespace = h.PID+1, h.Namespace+1 }, wire.Welcome},
		"a namespace that is not known": {func(h *hello) { h.PID, h.Namespace = h.PID+1, 0 }, wire.Welcome},
	} {
		t.Run(name, func(t *testing.T) {
			host, path, err := Host(filepath.Join(t.TempDir(), "private"), "", 2, Options{Secret: secret})
			require.NoError(t, err)
			defer func() { require.NoError(t, host.Close()) }()
			c, err := peer.Dial(t.Context(), path, peer.Options{})
			require.NoError(t, err)
			defer func() { require.NoError(t, c.Close()) }()
			me := newHello(1, 2)
			require.NotZero(t, me.Namespace)
			row.change(&me)
			require.NoError(t, c.Send(t.Context(), me.message()))
			m, err := c.Receive(t.Context())
			require.NoError(t, err)
			proof := secret.proof(memberProves, me, nonce(m.Body))
			require.NoError(t, c.Send(t.Context(), peer.Message{Kind: wire.Proof, Body: proof}))
			m, err = c.Receive(t.Context())
			require.NoError(t, err)
			require.Equal(t, row.reply, m.Kind)
		})
	}
}

// A host that admits without proving the secret is refused by the rank.
func TestAHostWithoutTheSecret(t *testing.T) {
	_, err := Join(t.Context(), aHost(t, true), 1, 2, Options{Secret: Secret("0123456789abcdef")})
	require.ErrorIs(t, err, peer.ErrPeer)
	require.ErrorContains(t, err, "the host does not prove")
}

func TestSecretsThatAreTooShort(t *testing.T) {
	o := Options{Secret: Secret("password")}
	_, _, err := Host(filepath.Join(t.TempDir(), "private"), "", 2, o)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.ErrorContains(t, err, "a secret of 8 bytes: use 16")
	_, err = Join(t.Context(), "nowhere", 1, 2, o)
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
}

// No way to print a secret, or options that have one, writes its bytes.
func TestSecretsAreNotWritten(t *testing.T) {
	o := Options{Secret: Secret("password password")}
	var texts []string
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%x", "%q", "%d"} {
		texts = append(texts, fmt.Sprintf(verb, o), fmt.Sprintf(verb, o.Secret))
	}
	var log bytes.Buffer
	for _, h := range []slog.Handler{slog.NewTextHandler(&log, nil), slog.NewJSONHandler(&log, nil)} {
		slog.New(h).Info("joining", "secret", o.Secret, "options", o)
	}
	asJSON, err := json.Marshal(o)
	require.NoError(t, err)
	for _, text := range append(texts, log.String(), string(asJSON)) {
		require.Contains(t, text, "secret of 17 bytes")
		for _, form := range []string{"password", "70617373", "112 97 115", base64.StdEncoding.EncodeToString(o.Secret)[:8]} {
			require.NotContains(t, text, form)
		}
	}
}
