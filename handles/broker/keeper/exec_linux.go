package keeper

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/environ"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/sealedfile"
)

// inheritVariable names, in the environment of a program that replaces a keeper, the file with the
// entries.
const inheritVariable = "CUVMM_KEEPER"

// saved is an entry in that file. Files are by number.
type saved struct {
	Key    Key
	Record []byte
	Files  []int
}

// save writes the entries, with the number by which the next process finds each file.
func (k *Keeper) save(number func(n int) (int, error)) ([]byte, error) {
	var all []saved
	for _, e := range k.entries {
		s := saved{Key: e.Key, Record: e.Record}
		for _, f := range e.Files {
			err := f.Use(func(n int) error {
				n, err := number(n)
				s.Files = append(s.Files, n)
				return err
			})
			if err != nil {
				return nil, err
			}
		}
		all = append(all, s)
	}
	return json.Marshal(all)
}

// maxSaved bounds the text that save writes.
const maxSaved = 1 << 31

// restore makes a keeper of what save wrote. It owns the files then.
func restore(text []byte, file func(n int) (*peer.FD, error)) (*Keeper, error) {
	var all []saved
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, errs.PeerCause(err, "keeper.Inherit", nil, "the file with the entries", "leave it to Keeper.Exec and Keeper.Store")
	}
	k := New()
	for _, s := range all {
		e := &Entry{Key: s.Key, Record: s.Record}
		for _, n := range s.Files {
			f, err := file(n)
			if err != nil {
				return nil, err
			}
			e.Files = append(e.Files, f)
		}
		k.entries[e.Key] = e
		k.files += len(e.Files)
	}
	return k, nil
}

// Exec replaces this process by a program, such as a later version of its own, which goes on with the
// entries ([Inherit]): it has the same pid, and no file was closed meanwhile. path, args and environment
// are those of syscall.Exec; extra are further files that the program gets, at their numbers. No Serve
// and no Run may run. Exec returns only if it failed, and then nothing has changed.
func (k *Keeper) Exec(path string, args, environment []string, extra ...*os.File) error {
	const op = "keeper.Keeper.Exec"
	k.mu.Lock()
	defer k.mu.Unlock()
	var open []int
	defer func() {
		for _, n := range open {
			_ = fd.Keep(n, false)
		}
	}()
	pass := func(n int) error {
		open = append(open, n)
		return fd.Keep(n, true)
	}
	text, err := k.save(func(n int) (int, error) { return n, pass(n) })
	if err != nil {
		return errs.SystemCall(op, "the files of an entry", err)
	}
	for _, f := range extra {
		if err := pass(int(f.Fd())); err != nil {
			return errs.SystemCall(op, f.Name(), err)
		}
	}
	n, err := sealedfile.New("cuvmm keeper", text)
	if err != nil {
		return errs.SystemCall(op, "a file for the entries", err)
	}
	defer func() { _ = fd.Close(n) }()
	if err := pass(n); err != nil {
		return errs.SystemCall(op, "a file for the entries", err)
	}
	err = fd.Exec(path, args, append(environment, inheritVariable+"="+strconv.Itoa(n)))
	return errs.PeerCause(err, op, nil, errs.Plain(path), "see that the program is there and can be executed")
}

// Inherit returns the keeper that [Keeper.Exec] or [Keeper.Store] left to this process, or nil if there is
// none. A program with raised rights inherits none.
func Inherit() (*Keeper, error) {
	const op = "keeper.Inherit"
	number := environ.Get(inheritVariable)
	if number == "" {
		return stored()
	}
	if err := os.Unsetenv(inheritVariable); err != nil { // children have no part in it
		return nil, errs.SystemCall(op, inheritVariable, err)
	}
	n, err := strconv.Atoi(number)
	if err != nil {
		return nil, errs.PeerCause(err, op, nil, fmt.Sprintf("%s=%q", inheritVariable, number), "leave the variable to Keeper.Exec")
	}
	defer func() { _ = fd.Close(n) }()
	text, err := sealedfile.Read(n, maxSaved)
	if err != nil {
		return nil, errs.SystemCall(op, "the file with the entries", err)
	}
	return restore(text, peer.NewFD)
}
