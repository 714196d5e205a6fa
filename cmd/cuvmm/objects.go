package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/load"
)

const objectsUsage = `usage: cuvmm objects [flags] [VERB [ARGUMENT...]]

Lists the objects of a broker (cuvmm serve), or does something with them:

  list               lists them, also those that are being written, and who holds them
  verify [NAME...]   compares their memory with the digests that they were committed with
  save DIR [NAME...] writes an image of each to a folder: a file in the safetensors format
  load FILE...       makes objects of images, of other files of that format, or of all files of
                     folders; a name that is there already stays as it is
  remove NAME...     ends them, publications too
  status             prints the broker's counts, in the text format of Prometheus, and fails unless the
                     broker is ready: clients of one before it have had their time to come back

Without names verify and save take all objects but ephemeral ones; verify skips those without
digests. A loaded file that is no image gives the object its own name, without .safetensors.

Flags:
`

// objectsFlags are the flags of objects.
type objectsFlags struct {
	socket, driver *string
	device         *int
	json           *bool
}

func objects(f *flag.FlagSet) func(args []string, out io.Writer, h host) (int, error) {
	o := objectsFlags{
		socket: f.String("socket", defaultSocket(), "the `path` of the broker's socket"),
		driver: driverFlag(f),
		device: f.Int("device", -1, "the `number` of the device to load to; -1 is the one that the image is of, or else the first"),
		json:   f.Bool("json", false, "print the list as JSON"),
	}
	return func(args []string, out io.Writer, h host) (int, error) {
		if err := checkChoice(*o.driver); err != nil {
			return exitUsage, err
		}
		verb := "list"
		if len(args) > 0 {
			verb, args = args[0], args[1:]
		}
		v, known := verbs[verb]
		switch {
		case !known:
			return exitUsage, fmt.Errorf("there is no verb %q: see cuvmm objects -h", verb)
		case len(args) < v.least || !v.more && len(args) > v.least:
			return exitUsage, fmt.Errorf("%s with %s: see cuvmm objects -h", verb, errs.Count(len(args), "argument"))
		}
		ctx, stop := untilEnded()
		defer stop()
		k, err := connect(ctx, h, *o.socket)
		if err == nil {
			r := &objectsRun{ctx: ctx, k: k, o: o, h: h, out: plain{out}, json: out}
			err = errs.Both(v.do(r, args), r.end())
		}
		if err != nil {
			return exitFailed, err
		}
		return exitOK, nil
	}
}

// verbs are what objects does.
var verbs = map[string]struct {
	least int
	more  bool
	do    func(r *objectsRun, args []string) error
}{
	"list":   {0, false, (*objectsRun).list},
	"verify": {0, true, (*objectsRun).verify},
	"save":   {1, true, (*objectsRun).save},
	"load":   {1, true, (*objectsRun).load},
	"remove": {1, true, (*objectsRun).remove},
	"status": {0, false, (*objectsRun).status},
}

// defaultSocket is where serve listens.
func defaultSocket() string {
	dir := os.Getenv("XDG_RUNTIME_DIR")
	if dir == "" {
		dir = filepath.Join(os.TempDir(), fmt.Sprintf("cuvmm-%d", os.Getuid()))
	} else {
		dir = filepath.Join(dir, "cuvmm")
	}
	return filepath.Join(dir, "broker")
}

// objectsRun is one call of the command.
type objectsRun struct {
	ctx       context.Context
	k         *broker.Client
	o         objectsFlags
	h         host
	out, json io.Writer
	sys       *cuda.System
}

func (r *objectsRun) end() error {
	r.h.progress.end()
	err := r.k.Close()
	if r.sys != nil {
		err = errs.Both(err, r.sys.Close())
	}
	return err
}

func (r *objectsRun) list([]string) error {
	all, err := r.k.List(r.ctx)
	if err != nil {
		return err
	}
	if *r.o.json {
		listed := make([]listedObject, len(all))
		for i, l := range all {
			listed[i] = listedObject{l, l.Device.String()}
		}
		return writeJSON(r.json, listed)
	}
	writeObjects(r.out, all)
	return nil
}

// listedObject is a listing as JSON, which names the device as nvidia-smi does.
type listedObject struct {
	broker.Listing
	Device string
}

func writeObjects(out io.Writer, all []broker.Listing) {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tVERSION\tSIZE\tDEVICE\tWRITER\tSINCE\tHELD BY")
	for _, l := range all {
		version := fmt.Sprint(l.Version)
		switch {
		case l.Publication:
			version = "publication"
		case l.Version == 0:
			version = "being written"
		case l.Ephemeral:
			version += ", ephemeral"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%v\t%d\t%s\t%s\n", errs.Words(l.Name), version, size(l.Bytes), l.Device, l.PID, l.Since.Format(time.DateTime), heldBy(l))
	}
	_ = t.Flush() // the output keeps its first error
}

// heldBy lists the processes that hold an object.
func heldBy(l broker.Listing) string {
	var all []string
	for _, p := range l.HeldBy {
		all = append(all, fmt.Sprint(p.PID))
	}
	if n := l.Holders - len(l.HeldBy); n > 0 {
		all = append(all, fmt.Sprintf("%d more", n))
	}
	return strings.Join(all, ", ")
}

// each attaches objects, by name, or all that last, and does something with each. It goes on after one
// that fails.
func (r *objectsRun) each(names []string, do func(o *broker.Object) (string, error)) error {
	all, err := r.k.List(r.ctx)
	if err != nil {
		return err
	}
	newest := map[string]broker.Listing{}
	for _, l := range all {
		if l.Version > newest[l.Name].Version {
			newest[l.Name] = l
		}
	}
	if len(names) == 0 {
		for _, l := range newest {
			if !l.Ephemeral {
				names = append(names, l.Name)
			}
		}
		slices.Sort(names)
	}
	var failed error
	for _, name := range names {
		if err := r.one(newest[name], name, do); err != nil {
			failed = errs.Both(failed, err)
		}
	}
	return failed
}

func (r *objectsRun) one(l broker.Listing, name string, do func(o *broker.Object) (string, error)) (err error) {
	d, err := r.device(l.Device.String(), l.Version == 0) // one that is not there fails below
	if err != nil {
		return err
	}
	r.h.progress.step("reading %s", errs.Words(name))
	o, err := r.k.Attach(r.ctx, d, name, broker.AttachOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errs.Both(err, o.Close()) }()
	said, err := do(o)
	if err == nil {
		r.say(o, said)
	}
	return err
}

// device returns the device of a UUID, or the first one.
func (r *objectsRun) device(id string, first bool) (*cuda.Device, error) {
	if r.sys == nil {
		sys, err := r.h.open(*r.o.driver)
		if err != nil {
			return nil, err
		}
		r.sys = sys
	}
	if n := *r.o.device; n >= 0 {
		return r.sys.Device(n)
	}
	for _, d := range r.sys.Devices() {
		if first || d.UUID().String() == id {
			return d, nil
		}
	}
	return nil, fmt.Errorf("no device %s here: name another with -device", id)
}

// say writes what was done with an object.
func (r *objectsRun) say(o *broker.Object, what string) {
	r.h.progress.end()
	l := o.About()
	fmt.Fprintf(r.out, "%s, version %d: %s\n", errs.Words(l.Name), l.Version, what)
}

func (r *objectsRun) verify(names []string) error {
	return r.each(names, func(o *broker.Object) (string, error) {
		some := slices.ContainsFunc(o.Manifest().Tensors, func(t handles.Tensor) bool { return t.Digest != "" })
		if len(names) == 0 && !some {
			return "has no digests", nil
		}
		return "as it was committed", o.Verify(r.ctx)
	})
}

const imageSuffix = ".safetensors"

// mostImageName leaves room in the name of a file, of 255 bytes, for what it is called until it is complete.
const mostImageName = 180

// imageFile returns the name of the file of an object's image. A name that is too long for one is cut, and told from
// others by its digest: the image has all of it.
func imageFile(name string) string {
	short := name
	for len(url.PathEscape(short)) > mostImageName {
		_, n := utf8.DecodeLastRuneInString(short)
		short = short[:len(short)-n]
	}
	if short == name {
		return url.PathEscape(name) + imageSuffix
	}
	sum := sha256.Sum256([]byte(name))
	return fmt.Sprintf("%s-%x%s", url.PathEscape(short), sum[:8], imageSuffix)
}

func (r *objectsRun) save(args []string) error {
	return r.each(args[1:], func(o *broker.Object) (string, error) {
		path := filepath.Join(args[0], imageFile(o.About().Name))
		if len(args) == 1 && len(o.Manifest().Tensors) == 0 {
			return "not saved: its manifest has no tensors", nil
		}
		return "saved to " + errs.Plain(path), o.Save(r.ctx, path)
	})
}

func (r *objectsRun) load(args []string) error {
	var failed error
	for _, path := range args {
		files, err := filesIn(path)
		failed = errs.Both(failed, err)
		for _, f := range files {
			failed = errs.Both(failed, r.loadFile(f))
		}
	}
	return failed
}

// filesIn returns the files to load: those of a folder, unless that is a model of several files.
func filesIn(path string) ([]string, error) {
	info, err := os.Stat(path)
	if err != nil || !info.IsDir() {
		return []string{path}, nil // opening it says what is wrong
	}
	if _, err := os.Stat(filepath.Join(path, "model.safetensors.index.json")); err == nil {
		return []string{path}, nil
	}
	entries, err := os.ReadDir(path)
	var all []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), imageSuffix) {
			all = append(all, filepath.Join(path, e.Name()))
		}
	}
	if err == nil && len(all) == 0 {
		err = fmt.Errorf("folder %s has no file that ends in %s: name one with images, or a file", errs.Plain(path), imageSuffix)
	}
	return all, err
}

func (r *objectsRun) loadFile(path string) (err error) {
	m, err := load.OpenSafetensors(path)
	if err != nil {
		return err
	}
	name, device := broker.ImageOf(m)
	if err := m.Close(); err != nil {
		return err
	}
	if name == "" {
		name = strings.TrimSuffix(filepath.Base(path), imageSuffix)
	}
	d, err := r.device(device, device == "")
	if err != nil {
		return fmt.Errorf("%s: %w", errs.Plain(path), err)
	}
	r.h.progress.step("loading %s", errs.Plain(path))
	began := time.Now()
	o, err := r.k.Load(r.ctx, d, name, path, broker.CreateOptions{})
	if err != nil {
		return err
	}
	said := fmt.Sprintf("loaded from %s, %s in %v", errs.Plain(path), size(o.About().Bytes), time.Since(began).Round(time.Millisecond))
	if o.About().Since.Before(began) {
		said = "was there"
	}
	r.say(o, said)
	return o.Close()
}

func (r *objectsRun) remove(names []string) error {
	var failed error
	for _, name := range names {
		failed = errs.Both(failed, r.k.Remove(r.ctx, name, 0))
	}
	return failed
}

func (r *objectsRun) status([]string) error {
	s, err := r.k.Status(r.ctx)
	if err != nil {
		return err
	}
	if s.Warning != "" {
		fmt.Fprintf(r.out, "# warning: %s\n", errs.Words(s.Warning))
	}
	for _, m := range []struct {
		name, kind string
		value      any
	}{
		{"ready", "gauge", map[bool]int{true: 1}[s.Ready]},
		{"start_time_seconds", "gauge", s.Since.Unix()},
		{"clients", "gauge", s.Clients},
		{"objects", "gauge", s.Objects},
		{"publications", "gauge", s.Publications},
		{"objects_being_written", "gauge", s.Writing},
		{"memory_bytes", "gauge", s.Bytes},
		{"memory_limit_bytes", "gauge", s.Limit},
		{"commits_total", "counter", s.Commits},
		{"attaches_total", "counter", s.Attaches},
		{"refusals_total", "counter", s.Refusals},
		{"warning", "gauge", map[bool]int{true: 1}[s.Warning != ""]},
	} {
		fmt.Fprintf(r.out, "# TYPE cuvmm_broker_%s %s\ncuvmm_broker_%s %v\n", m.name, m.kind, m.name, m.value)
	}
	if !s.Ready {
		return errors.New("the broker is not ready: clients of the one before it may come back yet")
	}
	return nil
}
