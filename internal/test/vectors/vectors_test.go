package vectors

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What the vectors say, the document says.
func TestTheDocumentHasTheVectors(t *testing.T) {
	document, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "protocol.md"))
	if _, here := os.Stat("vectors_test.go"); here == nil { // a test binary elsewhere has no documents
		require.NoError(t, err)
	}
	all := Read(t)
	for _, v := range slices.Concat(all.Messages, all.Groups, all.Objects) {
		t.Run(v.Message, func(t *testing.T) {
			form := v.Layout.String()
			if form == "" {
				form = "(empty)"
			}
			row := fmt.Sprintf("| 0x%04x | %s | %s | %s |", v.Kind, v.Message, v.To, form)
			if document != nil && !strings.Contains(string(document), row) {
				t.Errorf("docs/protocol.md has no row %s", row)
			}
			require.Equal(t, v.Body, hex.EncodeToString(v.Layout.Encode(t, v.Fields)), "the document's form")
		})
	}
}
