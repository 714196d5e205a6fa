package load

import (
	"encoding/json"
	"fmt"
	"math"
	"unicode/utf8"
)

// scanner reads JSON of a known shape: objects of strings, numbers and lists of numbers. It
// makes no tree and follows no nesting, so hostile text costs what it is long. The first error
// ends it.
type scanner struct {
	text []byte
	at   int
	err  error
}

func (s *scanner) fail(format string, args ...any) {
	if s.err == nil {
		s.err = fmt.Errorf("byte %d: %s", s.at, fmt.Sprintf(format, args...))
		s.at = len(s.text)
	}
}

// peek returns the next byte that is no space, or 0 at the end.
func (s *scanner) peek() byte {
	for s.at < len(s.text) {
		switch c := s.text[s.at]; c {
		case ' ', '\t', '\r', '\n':
			s.at++
		default:
			return c
		}
	}
	return 0
}

func (s *scanner) expect(c byte) {
	if got := s.peek(); got != c {
		s.fail("%q, where %q is expected", got, c)
		return
	}
	s.at++
}

// members calls f behind each key of an object.
func (s *scanner) members(f func(key string)) {
	s.list('{', '}', func() {
		key := s.string()
		if s.expect(':'); s.err == nil {
			f(key)
		}
	})
}

func (s *scanner) twice(key string) { s.fail("the key %q occurs twice", key) }

// list calls f before each of the values between two brackets.
func (s *scanner) list(open, end byte, f func()) {
	if s.expect(open); s.peek() == end && s.err == nil {
		s.at++
		return
	}
	for s.err == nil {
		f()
		if s.peek() != ',' {
			s.expect(end)
			return
		}
		s.at++
	}
}

func (s *scanner) string() (text string) {
	if s.expect('"'); s.err != nil {
		return ""
	}
	start, plain := s.at, true
	for ; s.at < len(s.text) && s.text[s.at] != '"'; s.at++ {
		if s.text[s.at] == '\\' {
			plain = false
			s.at++
		}
		if s.at < len(s.text) && s.text[s.at] < ' ' {
			s.fail("a control character in a string")
			return ""
		}
	}
	if s.at >= len(s.text) {
		s.fail("a string without an end")
		return ""
	}
	raw := s.text[start:s.at]
	s.at++
	switch {
	case !utf8.Valid(raw):
		s.fail("a string that is not UTF-8")
	case plain:
		return string(raw)
	case json.Unmarshal(s.text[start-1:s.at], &text) != nil:
		s.fail("an escape that JSON does not have")
	}
	return text
}

// number reads an integer from 0 to the largest int.
func (s *scanner) number() (n int) {
	if c := s.peek(); c < '0' || c > '9' {
		s.fail("%q, where an integer from 0 up is expected", c)
		return 0
	}
	start := s.at
	for ; s.at < len(s.text) && s.text[s.at] >= '0' && s.text[s.at] <= '9'; s.at++ {
		d := int(s.text[s.at] - '0')
		if n > (math.MaxInt-d)/10 {
			s.fail("an integer beyond 64 bits")
			return 0
		}
		n = n*10 + d
	}
	if s.at > start+1 && s.text[start] == '0' {
		s.fail("an integer with leading zeros")
	}
	return n
}

func (s *scanner) numbers() (all []int) {
	s.list('[', ']', func() { all = append(all, s.number()) })
	return all
}

// end requires that nothing but spaces follows.
func (s *scanner) end() {
	if c := s.peek(); s.at < len(s.text) {
		s.fail("%q behind the end", c)
	}
}
