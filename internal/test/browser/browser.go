// Package browser opens pages of inspect/page in a headless browser for tests.
package browser

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"html"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/stretchr/testify/require"
)

// Window is how a page is opened.
type Window struct {
	// Width and Height are 1400 and 900 unless they are set.
	Width, Height int
	Dark          bool
	// Policy permits that the page breaks its content security policy.
	Policy bool
}

// watch records what goes wrong from the beginning on.
const watch = `addEventListener("error", e => { document.documentElement.dataset.broken = e.message; });
addEventListener("securitypolicyviolation", e => { document.documentElement.dataset.refused = e.violatedDirective; });`

// Run runs a script on the page, and returns the data-result that the script gave the
// document's body. The test fails if the page throws or breaks its policy.
func (w Window) Run(t *testing.T, page, script string) string {
	t.Helper()
	out := w.open(t, page, script, "--dump-dom")
	said := func(name string) string {
		found := regexp.MustCompile("data-" + name + `="([^"]*)"`).FindStringSubmatch(out)
		if found == nil {
			return ""
		}
		return html.UnescapeString(found[1])
	}
	require.Empty(t, said("broken"), "the page throws")
	require.Equal(t, w.Policy, said("refused") != "", "the page breaks its policy: %s", said("refused"))
	require.NotEmpty(t, said("result"), "the page did not come to its end")
	return said("result")
}

// Picture runs a script on the page and writes what the window then shows to a file.
func (w Window) Picture(t *testing.T, page, script, to string) {
	t.Helper()
	w.open(t, page, script, "--screenshot="+to)
	require.FileExists(t, to)
}

func (w Window) open(t *testing.T, page, script, do string) string {
	t.Helper()
	browser := needs.Program(t, "chromium")
	if w.Width == 0 {
		w.Width, w.Height = 1400, 900
	}
	// A window has a least width, a page has not.
	script = fmt.Sprintf(`{ document.body.style.width = "%dpx"; dispatchEvent(new Event("resize")); theme(%t); %s }`, w.Width, w.Dark, script)
	for _, own := range []string{watch, script} { // which the policy of the page does not know
		sum := sha256.Sum256([]byte(own))
		page = strings.Replace(page, "script-src ", "script-src 'sha256-"+base64.StdEncoding.EncodeToString(sum[:])+"' ", 1)
	}
	page = strings.Replace(page, "<style>", "<script>"+watch+"</script><style>", 1)
	page = strings.Replace(page, "</body>", "<script>"+script+"</script></body>", 1)
	file := filepath.Join(t.TempDir(), "map.html")
	require.NoError(t, os.WriteFile(file, []byte(page), 0o600))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
		"--user-data-dir="+t.TempDir(), fmt.Sprintf("--window-size=%d,%d", w.Width, w.Height), "--virtual-time-budget=20000", do, "file://"+file).Output()
	require.NoError(t, err)
	return string(out)
}
