package errs

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Plain returns text that other processes or programs chose, for a terminal or an error:
// what would control a terminal or reorder the text is escaped as in Go's literals, except
// line ends and tabs.
func Plain(text string) string {
	if strings.IndexFunc(text, controls) < 0 {
		return text
	}
	var b strings.Builder
	for len(text) > 0 {
		r, n := utf8.DecodeRuneInString(text)
		if controls(r) {
			quoted := strconv.QuoteToASCII(text[:n])
			b.WriteString(quoted[1 : len(quoted)-1])
		} else {
			b.WriteString(text[:n])
		}
		text = text[n:]
	}
	return b.String()
}

// controls reports whether a terminal may obey the character; bytes that are no UTF-8 may
// be such characters of another encoding.
func controls(r rune) bool {
	return unicode.IsControl(r) && r != '\n' && r != '\t' || unicode.Is(unicode.Bidi_Control, r) || r == '\u2028' || r == '\u2029' || r == utf8.RuneError
}
