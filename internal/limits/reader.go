package limits

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// reader reads files of a machine, and collects what it could not read.
type reader struct {
	root   fs.FS
	failed []error
}

func (r *reader) err() error { return errors.Join(r.failed...) }

func (r *reader) fail(file string, err error) {
	r.failed = append(r.failed, fmt.Errorf("read the limits of memory: %s: %w", file, err))
}

// read returns the contents of a file, which may be missing.
func (r *reader) read(file string) (text []byte, ok bool) {
	text, err := fs.ReadFile(r.root, strings.TrimPrefix(file, "/"))
	switch {
	case err == nil:
		return text, true
	case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) && !errors.Is(err, syscall.ENODEV):
		r.fail(file, err)
	}
	return nil, false
}

// unlimited is no bound: version 1 writes the largest multiple of a page below 2^63.
const unlimited = 1 << 60

// number reads a count of bytes. It is not ok if the text is no number, which is an error,
// or no bound.
func (r *reader) number(file, text string) (n uint64, ok bool) {
	if text == "max" {
		return 0, false
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) {
		r.fail(file, fmt.Errorf("%q is neither a number of bytes nor max", text))
		return 0, false
	}
	return n, err == nil && n < unlimited
}

// bytes reads a file that is a count of bytes.
func (r *reader) bytes(file string) (n uint64, ok bool) {
	text, ok := r.read(file)
	if !ok {
		return 0, false
	}
	return r.number(file, strings.TrimSpace(string(text)))
}

// fields returns the lines of a file of names and values: "name value", "name: value kB".
func (r *reader) fields(file string) iter.Seq2[string, string] {
	return func(yield func(name, value string) bool) {
		text, _ := r.read(file)
		for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
			if f := strings.Fields(lines.Text()); len(f) >= 2 && !yield(strings.TrimSuffix(f[0], ":"), f[1]) {
				return
			}
		}
	}
}

// sum returns the sum of the named fields of a file, and how many of them it has.
func (r *reader) sum(file string, names ...string) (n uint64, found int) {
	for name, value := range r.fields(file) {
		if slices.Contains(names, name) {
			if v, ok := r.number(file, value); ok {
				n += v
				found++
			}
		}
	}
	return n, found
}

// available returns the machine's memory and the kernel's estimate of what can be taken
// without swapping.
func (r *reader) available() []Limit {
	const file, kib = "/proc/meminfo", 1024
	total, known := r.sum(file, "MemTotal")
	free, estimated := r.sum(file, "MemAvailable")
	if known != 1 || estimated != 1 {
		return nil
	}
	return []Limit{{File: file, Bytes: total * kib, Used: (total - min(free, total)) * kib}}
}

// group is a visible control group.
type group struct {
	folder string // of its files
	path   string // in its hierarchy, as far as the process sees it
	v1     bool
}

// groups returns the visible groups that bound this process's memory, each before its parent.
func (r *reader) groups() (all []group) {
	own := map[bool]string{true: "/", false: "/"} // by version 1 or not
	text, _ := r.read("/proc/self/cgroup")
	for line := range strings.Lines(string(text)) {
		// hierarchy:controllers:path, where version 2 has no controllers
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) == 3 && (f[1] == "" || hasMemory(f[1])) {
			own[f[1] != ""] = path.Clean("/" + f[2])
		}
	}
	seen := map[string]bool{}
	for _, m := range r.mounts() {
		at := own[m.v1]
		if below := strings.TrimPrefix(at, m.from); m.from != "/" && (below == "" || len(below) < len(at) && below[0] == '/') {
			at = path.Clean("/" + below)
		}
		for ; ; at = path.Dir(at) {
			if g := (group{path.Join(m.to, at), at, m.v1}); !seen[g.folder] {
				seen[g.folder] = true
				all = append(all, g)
			}
			if at == "/" {
				break
			}
		}
	}
	return all
}

func hasMemory(controllers string) bool {
	return slices.Contains(strings.Split(controllers, ","), "memory")
}

// mount is where groups of a hierarchy from one on are seen.
type mount struct {
	from, to string
	v1       bool
}

// mounts returns the mounted hierarchies that can have the memory controller. The usual places
// are among them even if the list of mounts does not name them.
func (r *reader) mounts() (all []mount) {
	text, _ := r.read("/proc/self/mountinfo")
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	for line := range strings.Lines(string(text)) {
		// id parent device root mountpoint options [optional ...] - type source superoptions
		place, kind, _ := strings.Cut(line, " - ")
		p, k := strings.Fields(place), strings.Fields(kind)
		if len(p) < 5 || len(k) < 3 {
			continue
		}
		if v1 := k[0] == "cgroup" && hasMemory(k[2]); v1 || k[0] == "cgroup2" {
			all = append(all, mount{path.Clean("/" + unescape.Replace(p[3])), path.Clean("/" + unescape.Replace(p[4])), v1})
		}
	}
	for _, usual := range []mount{{"/", "/sys/fs/cgroup", false}, {"/", "/sys/fs/cgroup/memory", true}} {
		if !slices.ContainsFunc(all, func(m mount) bool { return m.to == usual.to }) {
			all = append(all, usual)
		}
	}
	return all
}

// hostLimits returns the limits that a group sets on host memory.
func (r *reader) hostLimits(g group) (all []Limit) {
	limits, usage, cache := []string{"memory.max", "memory.high"}, "memory.current", []string{"inactive_file", "active_file"}
	if g.v1 {
		limits, usage, cache = []string{"memory.limit_in_bytes"}, "memory.usage_in_bytes", []string{"total_inactive_file", "total_active_file"}
	}
	for _, name := range limits {
		file := path.Join(g.folder, name)
		n, ok := r.bytes(file)
		if !ok {
			continue
		}
		used, _ := r.bytes(path.Join(g.folder, usage))
		cached, _ := r.sum(path.Join(g.folder, "memory.stat"), cache...)
		all = append(all, Limit{File: file, Group: g.path, Bytes: n, Used: used - min(used, cached)})
	}
	return all
}

// deviceLimits returns the limits that a group sets on the regions of device memory.
func (r *reader) deviceLimits(g group) map[string]Limit {
	file := path.Join(g.folder, "dmem.max")
	all := map[string]Limit{}
	for region, value := range r.fields(file) {
		if n, ok := r.number(file, value); ok {
			all[region] = Limit{File: file, Group: g.path, Bytes: n}
		}
	}
	if len(all) == 0 {
		return nil
	}
	usage := path.Join(g.folder, "dmem.current")
	for region, value := range r.fields(usage) {
		if l, ok := all[region]; ok {
			l.Used, _ = r.number(usage, value)
			all[region] = l
		}
	}
	return all
}
