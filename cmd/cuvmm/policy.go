package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"github.com/cuvmm/cuvmm/handles/broker"
)

// policyFile is a policy in a file, which is read again when that changes.
type policyFile struct {
	path    string
	current atomic.Pointer[broker.Policy]
	// read is the file as it was when it was read last.
	read os.FileInfo
	// wrong is why the file's policy is not in force.
	wrong atomic.Pointer[string]
}

// reread is how often the file is looked at.
const reread = 500 * time.Millisecond

// load reads the file. After an error the policy stays as it was.
func (p *policyFile) load() error {
	err := p.parse()
	p.isWrong(err)
	return err
}

func (p *policyFile) isWrong(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	p.wrong.Store(&text)
}

// warning is broker.Options.Warning.
func (p *policyFile) warning() string {
	why := p.wrong.Load()
	switch {
	case why == nil || *why == "":
		return ""
	case p.current.Load() == nil:
		return "no policy is in force, so that nothing is granted: " + *why
	}
	return "the policy that is in force is not the file's: " + *why
}

func (p *policyFile) parse() error {
	info, err := os.Stat(p.path)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is no file", p.path) // reading a pipe would wait
	}
	if err != nil {
		return fmt.Errorf("the policy: %w: name a file with rules, as docs/broker.md has them", err)
	}
	text, err := os.ReadFile(p.path)
	if err != nil {
		return err
	}
	p.read = info // also of a file that is refused: it is refused once
	policy, err := broker.ParsePolicy(text)
	if err != nil {
		return fmt.Errorf("%s: %w", p.path, err)
	}
	p.current.Store(policy)
	return nil
}

// changed reports whether the file is another one than was read last.
func (p *policyFile) changed() bool {
	info, err := os.Stat(p.path)
	if err != nil {
		gone := p.read != nil
		p.read = nil // whatever comes in its place is read
		return gone
	}
	return p.read == nil || !os.SameFile(info, p.read) || info.Size() != p.read.Size() || !info.ModTime().Equal(p.read.ModTime())
}

// watch reads the file whenever it changes, until the context ends.
func (p *policyFile) watch(ctx context.Context, log *slog.Logger) {
	tick := time.NewTicker(reread)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if !p.changed() {
			continue
		}
		known := p.warning()
		if p.load() != nil {
			if wrong := p.warning(); wrong != known { // not each time that a directory is looked at
				log.Error("cuvmm: " + wrong)
			}
			continue
		}
		log.Info("cuvmm: the policy was read", "file", p.path)
	}
}

// authorize is broker.Options.Authorize. Without a policy that can be used it grants nothing.
func (p *policyFile) authorize(c broker.Caller, name string) broker.Grant {
	return p.current.Load().Authorize(c, name)
}
