package sim

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// entry is the declaration of a kernel in PTX.
type entry struct {
	name   string
	params []param
	size   uint64 // of all parameters in one block
	shared uint64 // static, of each block
}

// param is where a parameter lies in the block of parameters.
type param struct{ offset, size uint64 }

var (
	ptxComment = regexp.MustCompile(`(?s)//[^\n]*|/\*.*?\*/`)
	ptxString  = regexp.MustCompile(`"[^"\n]*"`)
	ptxVersion = regexp.MustCompile(`^\s*\.version\s+(\d+)\.(\d+)\s`)
	ptxTarget  = regexp.MustCompile(`^\s*\.target\s+sm_(\d+)`)
	ptxNarrow  = regexp.MustCompile(`\.address_size\s+32\b`)
	ptxEntry   = regexp.MustCompile(`\.entry\b`)
	ptxHead    = regexp.MustCompile(`^\s+([A-Za-z][A-Za-z0-9_$]*|[_$%][A-Za-z0-9_$]+)\s*(?:\(([^(){};]*)\))?((?:\s*\.[a-z_]+(?:\s+(?:\d+(?:\s*,\s*\d+)*|"[^"]*"))?)*)\s*([{;])`)
	ptxParam   = regexp.MustCompile(`^\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)\s+(?:\.ptr\s+(?:\.[a-z]+\s+)*(?:\.align\s+\d+\s+)?)?[A-Za-z0-9_$%]+\s*(?:\[\s*(\d+)\s*\])?$`)
)

// ptxNumber is a version of PTX.
type ptxNumber struct{ major, minor int }

func (n ptxNumber) after(m ptxNumber) bool {
	return n.major > m.major || n.major == m.major && n.minor > m.minor
}

func (n ptxNumber) String() string { return fmt.Sprintf("%d.%d", n.major, n.minor) }

// newestPTX is the version of PTX that came with a version of CUDA: 9.0 with 13.0.
func newestPTX(cuda int) ptxNumber { return ptxNumber{cuda/1000 - 4, cuda % 1000 / 10} }

// compiler is the one that a driver has for PTX: the newest version that it knows,
// and the target of the device.
type compiler struct {
	newest ptxNumber
	target int
}

// errPTXVersion is text of a version that the compiler does not know.
var errPTXVersion = errors.New("unsupported .version")

// isPTX reports whether an image is taken for PTX at all.
func isPTX(text string) bool {
	return strings.HasPrefix(strings.TrimSpace(ptxComment.ReplaceAllString(text, " ")), ".version")
}

// parsePTX reads the declarations out of PTX text, and refuses what a compiler
// refuses in all but the statements of bodies, which it does not read.
func parsePTX(text string, c compiler) (map[string]entry, error) {
	text = ptxComment.ReplaceAllString(text, " ")
	if strings.Contains(text, "/*") {
		return nil, errors.New("a comment has no end")
	}
	text = ptxString.ReplaceAllString(text, `""`)
	rest, err := c.readHead(text)
	if err != nil {
		return nil, err
	}
	if err := checkStatements(rest); err != nil {
		return nil, err
	}
	return readEntries(rest)
}

// readHead reads the directives that text begins with, and returns what follows.
func (c compiler) readHead(text string) (rest string, err error) {
	found := ptxVersion.FindStringSubmatch(text)
	if found == nil {
		return "", errors.New("missing .version directive at the start; it has a major and a minor number, as 7.5")
	}
	major, bad := strconv.Atoi(found[1])
	minor, worse := strconv.Atoi(found[2])
	version := ptxNumber{major, minor}
	if bad != nil || worse != nil || version.after(c.newest) {
		return "", fmt.Errorf("%w %s.%s; the newest is %v", errPTXVersion, found[1], found[2], c.newest)
	}
	rest = text[len(found[0]):]
	if found = ptxTarget.FindStringSubmatch(rest); found == nil {
		return "", errors.New("missing .target sm_ directive behind the .version")
	}
	target, err := strconv.Atoi(found[1])
	if err != nil || target > c.target {
		return "", fmt.Errorf("the .target sm_%s is higher than the device's, sm_%d", found[1], c.target)
	}
	if ptxNarrow.MatchString(rest) {
		return "", errors.New("an .address_size of 32 is not supported")
	}
	return rest, nil
}

// checkStatements sees that every statement outside of bodies is a directive, and
// that every brace has its other.
func checkStatements(text string) error {
	begin, depth := 0, 0
	for i, r := range text {
		switch r {
		case '{':
			depth++
			continue
		case '}':
			depth--
		case ';':
		default:
			continue
		}
		switch {
		case depth < 0:
			return errors.New("a closing brace has no opening one")
		case depth > 0:
			continue
		}
		if err := checkDirective(text[begin:i]); err != nil {
			return err
		}
		begin = i + 1
	}
	if depth > 0 {
		return errors.New("an opening brace has no closing one")
	}
	return checkDirective(text[begin:])
}

func checkDirective(statement string) error {
	statement = strings.TrimSpace(statement)
	if statement == "" || statement[0] == '.' || strings.HasPrefix(statement, "@@") {
		return nil
	}
	return fmt.Errorf("parsing error near %.40q: a directive begins with a point", statement)
}

func readEntries(text string) (map[string]entry, error) {
	entries := map[string]entry{}
	for {
		at := ptxEntry.FindStringIndex(text)
		if at == nil {
			return entries, nil
		}
		text = text[at[1]:]
		found := ptxHead.FindStringSubmatch(text)
		if found == nil {
			return nil, fmt.Errorf("the entry at %.40q is not a name, parameters in parentheses, directives and a body", text)
		}
		e := entry{name: found[1]}
		if _, ok := entries[e.name]; ok {
			return nil, fmt.Errorf("entry %s is there twice", e.name)
		}
		text = text[len(found[0]):]
		if found[4] == ";" {
			continue // only a declaration
		}
		body := text
		var err error
		if text, err = skipBody(text); err != nil {
			return nil, fmt.Errorf("entry %s: %w", e.name, err)
		}
		if e.shared, err = sharedOf(body[:len(body)-len(text)]); err != nil {
			return nil, fmt.Errorf("entry %s: %w", e.name, err)
		}
		if list := strings.TrimSpace(found[2]); list != "" {
			for declared := range strings.SplitSeq(list, ",") {
				if err := e.add(strings.TrimSpace(declared)); err != nil {
					return nil, fmt.Errorf("entry %s: %w", e.name, err)
				}
			}
		}
		entries[e.name] = e
	}
}

// skipBody returns what follows the body of an entry, whose opening brace was
// read. Of the body it only sees whether it is cut short.
func skipBody(text string) (rest string, err error) {
	for depth, i := 1, 0; i < len(text); i++ {
		switch text[i] {
		case '{':
			depth++
		case '}':
			if depth--; depth > 0 {
				continue
			}
			body := strings.TrimSpace(text[:i])
			if ptxEntry.MatchString(body) {
				return "", fmt.Errorf("another entry begins in its body")
			}
			if body != "" && !strings.ContainsRune(";:}", rune(body[len(body)-1])) {
				return "", fmt.Errorf("the last statement of its body has no end")
			}
			return text[i+1:], nil
		}
	}
	return "", fmt.Errorf("its body has no end")
}

// add appends a parameter, in the layout that the driver gives the block.
func (e *entry) add(declared string) error {
	part := ptxParam.FindStringSubmatch(declared)
	if part == nil {
		return fmt.Errorf("parameter %q is not understood", declared)
	}
	bits, err := strconv.ParseUint(part[3], 10, 16)
	if err != nil || bits%8 != 0 || bits == 0 {
		return fmt.Errorf("parameter %q: %d bits are no whole bytes", declared, bits)
	}
	size, align := bits/8, bits/8
	if part[1] != "" {
		if align, err = strconv.ParseUint(part[1], 10, 16); err != nil || align == 0 || align&(align-1) != 0 {
			return fmt.Errorf("parameter %q: the alignment is no power of two", declared)
		}
	}
	if part[4] != "" {
		n, err := strconv.ParseUint(part[4], 10, 32)
		if err != nil {
			return fmt.Errorf("parameter %q: %w", declared, err)
		}
		size *= n
	}
	p := param{roundUp(e.size, align), size}
	e.params = append(e.params, p)
	e.size = p.offset + p.size
	return nil
}
