package repotest

import (
	"fmt"
	"go/scanner"
	"go/token"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// poorWords are words that stand where a plainer one names the actor or the act.
// The pattern is put together from pieces, so that this file passes.
var poorWords = regexp.MustCompile(`(?i)\b(answ` + `er(s|ed|ing)?|some` + `body('s)?|no` + `body('s)?|also n` + `ot|twice is o` + `nce)\b`)

// poorWordsLeft is how many of them the repository still has. It may only fall.
const poorWordsLeft = 0

// prose are the files that consist of prose and of comments, beside Go's.
var prose = []string{".md", ".sh", ".py", ".c", ".h", ".cc", ".ptx"}

// checkWords: functions return, errors name the actor, and a comment reads as
// English.
func checkWords(tr *tree) []string {
	var complaints []string
	complain := func(name string, line int, text string) {
		for i, l := range strings.Split(text, "\n") {
			if w := poorWords.FindString(l); w != "" {
				complaints = append(complaints, fmt.Sprintf("%s:%d: %q: say who does what: functions return, drivers return, a caller or a peer is named", name, line+i, w))
			}
		}
	}
	for _, name := range tr.files {
		switch {
		case slices.Contains(strings.Split(name, "/"), "testdata"):
		case path.Ext(name) == ".go":
			set, src := token.NewFileSet(), []byte(tr.read(name))
			var s scanner.Scanner
			s.Init(set.AddFile(name, -1, len(src)), src, nil, scanner.ScanComments)
			for {
				pos, tok, text := s.Scan()
				if tok == token.EOF {
					break
				}
				if tok == token.COMMENT || tok == token.STRING {
					complain(name, set.Position(pos).Line, text)
				}
			}
		case slices.Contains(prose, path.Ext(name)):
			complain(name, 1, tr.read(name))
		}
	}
	return complaints
}

func TestWordsAreFewer(t *testing.T) {
	complaints := checkWords(repository(t))
	if n := len(complaints); n > poorWordsLeft {
		t.Errorf("%d lines have words that read as translated, of at most %d:\n%s", n, poorWordsLeft, strings.Join(complaints, "\n"))
	}
	t.Logf("%d lines are left", len(complaints))
}

func TestWords(t *testing.T) {
	poor := "answ" + "ers"
	wantComplaints(t, checkWords(given(t,
		"a.md", "fine\nit "+poor+" late\n",
		"b.go", "package b\n\n// f "+poor+" x.\nfunc f() { "+poor+" := `a\n"+poor+"`; _ = "+poor+" }\n",
		"c.sh", "# Some"+"body's\n",
		"d.go", "package d\n\nvar "+poor+" = 1 // fine\n",
		"e.c", "/* also n"+"ot */\n",
		"testdata/f.md", poor,
		"g.json", poor,
	)),
		"a.md:2: \""+poor+"\"",
		"b.go:3: \""+poor+"\"",
		"b.go:5: \""+poor+"\"",
		"c.sh:1: \"Some"+"body's\"",
		"e.c:1: \"also n"+"ot\"")
}
