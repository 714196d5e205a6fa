package broker

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/user"
	"slices"
	"strconv"
	"strings"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// Caller is a process that requests something of a broker.
type Caller struct {
	peer.Credentials
	// Groups are all groups that the process is in.
	Groups []uint32
	// Known is false, and all else zero, for an inherited connection.
	Known bool
}

// Grant is what a caller may do with objects of a name. The zero value is nothing.
type Grant struct {
	// Access is what it may do: read access is needed to attach and to list objects, write access to write
	// and to remove them.
	Access publish.Access
	// EphemeralOnly has it write ephemeral objects alone.
	EphemeralOnly bool
	// Copy has what it commits be copied, into memory that no process of it ever had: its readers need not trust
	// that it writes no more. Meanwhile both count.
	Copy bool
	// Quota bounds what its user writes.
	Quota Quota
}

// Quota bounds the objects that a user wrote, each while its memory counts. 0 is no bound.
type Quota struct {
	// Bytes are of their memory, and Descriptors how many files keeper and broker have of them.
	Bytes, Objects, Descriptors int
	// Counts reports whether objects of a name count. Nil counts all, and so does a panic. It must not call the broker.
	Counts func(name string) bool
}

// Policy says who may do what, as an administrator writes it: see docs/broker.md. The nil policy grants
// nothing.
type Policy struct{ rules []rule }

// rule is a rule of a policy. The first that matches a caller and a name decides.
type rule struct {
	users, groups []uint32
	everyone      bool
	names         []string
	grant         Grant
}

// ParsePolicy reads a policy from JSON. Users and groups that are named must be known to this machine.
func ParsePolicy(text []byte) (*Policy, error) {
	const op = "broker.ParsePolicy"
	var file struct {
		Rules []struct {
			Users, Groups, Names []string
			Access               string
			Ephemeral, Copy      bool
			Limit                struct{ MiB, Objects, Descriptors int }
		}
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	err := d.Decode(&file)
	if err == nil {
		err = oneOfEachKey(json.NewDecoder(bytes.NewReader(text)))
	}
	if err == nil {
		if _, more := d.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("there is more behind it")
		}
	}
	if err != nil {
		return nil, errs.PeerCause(err, op, nil, "a policy", `write {"rules": [...]}: see docs/broker.md`)
	}
	if len(file.Rules) == 0 {
		return nil, errs.PeerInvalid(op, "a policy without rules, which grants nothing", `write {"rules": [...]}: see docs/broker.md`)
	}
	p := &Policy{}
	for i, in := range file.Rules {
		bad := func(asked, hint string) error {
			return errs.PeerInvalid(op, fmt.Sprintf("rule %d: %s", i+1, asked), hint)
		}
		r := rule{names: in.Names, everyone: slices.Contains(in.Users, "*")}
		switch in.Access {
		case "none":
		case "read":
			r.grant.Access = publish.ReadAccess
		case "write":
			r.grant.Access = publish.WriteAccess
		default:
			return nil, bad(fmt.Sprintf("access %q", in.Access), `use "none", "read" or "write"`)
		}
		switch {
		case slices.Contains(in.Groups, "*"):
			return nil, bad("all groups", `name all users instead, "users": ["*"]`)
		case in.Names != nil && len(in.Names) == 0:
			return nil, bad("an empty list of names, which no name is in", `name some, or leave "names" out for all`)
		case len(in.Users)+len(in.Groups) == 0:
			return nil, bad("neither users nor groups", `name some, or "users": ["*"] for all`)
		}
		var err error
		if r.users, err = numbers(in.Users, userID); err == nil {
			r.groups, err = numbers(in.Groups, groupID)
		}
		if err != nil {
			return nil, bad(err.Error(), "use numbers, or names that this machine knows")
		}
		l := in.Limit
		switch {
		case l.MiB < 0 || l.MiB > maxBytes>>20 || l.Objects < 0 || l.Descriptors < 0:
			return nil, bad(fmt.Sprintf("a limit of %d MiB, %d objects and %d descriptors", l.MiB, l.Objects, l.Descriptors), fmt.Sprintf("use 0 for none, and at most %d MiB", maxBytes>>20))
		case in.Ephemeral && in.Copy:
			return nil, bad("ephemeral objects that are copied, which no rule can have", `leave "ephemeral" or "copy" out`)
		case in.Access != "write" && (in.Ephemeral || in.Copy || max(l.MiB, l.Objects, l.Descriptors) > 0):
			return nil, bad(fmt.Sprintf("access %q with what bounds writing", in.Access), `leave "ephemeral", "copy" and "limit" out, or use "write"`)
		}
		r.grant.EphemeralOnly, r.grant.Copy = in.Ephemeral, in.Copy
		r.grant.Quota = Quota{Bytes: l.MiB << 20, Objects: l.Objects, Descriptors: l.Descriptors, Counts: r.hasName}
		p.rules = append(p.rules, r)
	}
	return p, nil
}

// oneOfEachKey refuses an object that has a key twice, of which the last alone would count, or in another case than
// the document has it. The decoder takes keys that differ in case alone for one.
func oneOfEachKey(d *json.Decoder) error {
	t, err := d.Token()
	if err != nil {
		return err
	}
	switch t {
	case json.Delim('{'):
		seen := map[string]bool{}
		for d.More() {
			key, err := d.Token()
			if err != nil {
				return err
			}
			name := strings.ToLower(key.(string))
			if name == "mib" {
				name = "MiB"
			}
			switch {
			case seen[name]:
				return fmt.Errorf("the key %q comes twice in one object", key)
			case key != name:
				return fmt.Errorf("the key %q, which is written %q", key, name)
			}
			seen[name] = true
			if err := oneOfEachKey(d); err != nil {
				return err
			}
		}
	case json.Delim('['):
		for d.More() {
			if err := oneOfEachKey(d); err != nil {
				return err
			}
		}
	default:
		return nil
	}
	_, err = d.Token()
	return err
}

// numbers returns the numbers of users or groups.
func numbers(names []string, lookup func(name string) (string, error)) (all []uint32, err error) {
	for _, name := range names {
		if name == "*" {
			continue
		}
		id, err := strconv.ParseUint(name, 10, 32)
		if err != nil {
			var text string
			if text, err = lookup(name); err == nil {
				id, err = strconv.ParseUint(text, 10, 32)
			}
		}
		if err != nil {
			return nil, err
		}
		all = append(all, uint32(id))
	}
	return all, nil
}

func userID(name string) (string, error) {
	u, err := user.Lookup(name)
	if err != nil {
		return "", err
	}
	return u.Uid, nil
}

func groupID(name string) (string, error) {
	g, err := user.LookupGroup(name)
	if err != nil {
		return "", err
	}
	return g.Gid, nil
}

// unmapped is the user, and the group, that the system shows for those of another user namespace that
// are not mapped into this one (kernel.overflowuid): it may be anyone.
const unmapped = 65534

// Authorize returns what a caller may do with objects of a name: it is Options.Authorize. A caller that is
// not known, or whose user is not mapped into the broker's user namespace, may do nothing.
func (p *Policy) Authorize(c Caller, name string) Grant {
	if p == nil || !c.Known || c.UID == unmapped {
		return Grant{}
	}
	for i := range p.rules {
		if r := &p.rules[i]; r.hasCaller(c) && r.hasName(name) {
			return r.grant
		}
	}
	return Grant{}
}

func (r *rule) hasCaller(c Caller) bool {
	if r.everyone || slices.Contains(r.users, c.UID) {
		return true
	}
	for _, g := range c.Groups {
		if g != unmapped && slices.Contains(r.groups, g) {
			return true
		}
	}
	return false
}

// hasName reports whether one of the rule's patterns, or none, is the name's.
func (r *rule) hasName(name string) bool {
	return len(r.names) == 0 || slices.ContainsFunc(r.names, func(pattern string) bool { return matches(pattern, name) })
}

// matches reports whether a name is that of a pattern, in which each * is any text.
func matches(pattern, name string) bool {
	parts := strings.Split(pattern, "*")
	name, ok := strings.CutPrefix(name, parts[0])
	if len(parts) == 1 {
		return ok && name == ""
	}
	for _, part := range parts[1 : len(parts)-1] { // each as early as it comes leaves the most for the next
		at := strings.Index(name, part)
		if at < 0 {
			return false
		}
		name = name[at+len(part):]
	}
	return ok && strings.HasSuffix(name, parts[len(parts)-1])
}
