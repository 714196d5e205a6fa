package publish

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/vectors"
	"github.com/stretchr/testify/require"
)

var writeVectors = flag.Bool("write-vectors", false, "write the vectors that other implementations compare themselves with")

// changed returns the n-th change of a body: up to three bytes are replaced, inserted or
// removed, as the same generator draws them in every language.
func changed(body []byte, n uint64) []byte {
	x, out := n*0x9e3779b97f4a7c15+1, slices.Clone(body)
	draw := func(below int) int {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		return int(x % uint64(below))
	}
	for range 1 + draw(3) {
		switch how := draw(5); {
		case how == 3:
			at := draw(len(out) + 1)
			out = slices.Insert(out, at, byte(draw(256)))
		case len(out) > 0 && how == 4:
			at := draw(len(out))
			out = slices.Delete(out, at, at+1)
		case len(out) > 0:
			value := draw(256)
			at := draw(len(out))
			out[at] = []byte{0, 255, byte(value)}[how]
		}
	}
	return out
}

// What this package takes of bodies that differ from the vectors, every implementation
// takes: the file has a digit for each change.
func TestChangedVectorsAreTakenAlikeEverywhere(t *testing.T) {
	type message struct {
		Message string `json:"message"`
		Taken   string `json:"taken"`
	}
	var all []message
	for _, v := range vectors.Read(t).Messages {
		if v.Kind > peer.MaxKind {
			continue // of transfers
		}
		body, err := hex.DecodeString(v.Body)
		require.NoError(t, err)
		taken := make([]byte, 2000)
		for n := range taken {
			taken[n] = '1'
			if _, err := readAny(v.Kind, changed(body, uint64(n)), v.Files); err != nil {
				taken[n] = '0'
			}
		}
		require.Contains(t, string(taken), "0")
		all = append(all, message{v.Message, string(taken)})
	}
	compareVectors(t, "mutations.json", all)
}

// compareVectors compares what this package does with a file of vectors, or writes it.
func compareVectors(t *testing.T, name string, now any) {
	raw, err := json.MarshalIndent(now, "", "\t")
	require.NoError(t, err)
	compareFile(t, name, append(raw, '\n'))
}

// compareFile is compareVectors for the text of the file.
func compareFile(t *testing.T, name string, raw []byte) {
	path := filepath.Join("..", "..", "internal", "test", "vectors", "testdata", name)
	if *writeVectors {
		require.NoError(t, os.WriteFile(path, raw, 0o644))
	}
	file, err := os.ReadFile(path)
	if _, here := os.Stat("mutations_test.go"); here != nil { // a test binary elsewhere has no files of vectors
		return
	}
	require.NoError(t, err)
	require.True(t, bytes.Equal(raw, file), "%s differs: if that is meant, go test -run %s -args -write-vectors", path, t.Name())
}
