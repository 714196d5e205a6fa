//go:build linux

package rendezvous

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/stretchr/testify/require"
)

// Only processes with the group's secret get in, and only at a host that has it.
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
	h, challenge := hello{1, 3, newNonce()}, newNonce()
	proof := s.proof(memberProves, h, challenge)
	require.True(t, s.proves(memberProves, h, challenge, proof))
	for name, other := range map[string]bool{
		"another challenge":  s.proves(memberProves, h, newNonce(), proof),
		"another connection": s.proves(memberProves, hello{1, 3, newNonce()}, challenge, proof),
		"another rank":       s.proves(memberProves, hello{2, 3, h.Nonce}, challenge, proof),
		"another size":       s.proves(memberProves, hello{1, 4, h.Nonce}, challenge, proof),
		"the other side":     s.proves(hostProves, h, challenge, proof),
		"none":               s.proves(memberProves, h, challenge, nil),
	} {
		require.False(t, other, name)
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
