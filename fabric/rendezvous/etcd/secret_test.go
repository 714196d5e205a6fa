package etcd

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
)

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

// A proof is good for one key, one value and one secret.
func TestProofs(t *testing.T) {
	s := Secret("0123456789abcdef")
	value, ok := open(s, "key", []byte(seal(s, "key", []byte("value"))))
	require.True(t, ok)
	require.Equal(t, "value", string(value))
	for name, forged := range map[string]string{
		"another secret":       seal(Secret("0123456789abcdeF"), "key", []byte("value")),
		"a secret with a zero": seal(append(s[:len(s):len(s)], 0), "key", []byte("value")),
		"no secret":            seal(nil, "key", []byte("value")),
		"another key":          seal(s, "kez", []byte("value")),
		"a part of the key":    seal(s, "ke", []byte("yvalue")),
		"no proof":             "value",
		"another value":        "Value" + seal(s, "key", []byte("value"))[5:],
		"nothing":              "",
	} {
		_, ok := open(s, "key", []byte(forged))
		require.False(t, ok, name)
	}
}
