//go:build unix

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/handles/broker/keeper"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
)

const serveUsage = `usage: cuvmm serve [flags]

Keeps GPU memory for the processes of this user, or of those that a policy admits, which write objects
and attach them by name (package handles/broker). This process holds the file descriptors of all memory, and uses no GPU. It
starts another, the broker, which does the rest, and starts it again whenever it ends.

  SIGTERM, SIGINT   end both; memory that no process has mapped is freed, unless systemd keeps it
                    for the next start (FileDescriptorStoreMax)
  SIGHUP            replaces the broker; clients notice nothing but a pause
  SIGUSR2           replaces this process too, by the program at its path: an upgrade that
                    closes no descriptor

A service manager may pass a listening socket of type SOCK_SEQPACKET (LISTEN_FDS); otherwise one
is made, in a directory that only this user may enter, or, with a policy, all users.

A policy is a file that says who may do what (docs/broker.md). It is read again when it changes; one with
a mistake, or that is gone, is logged and shown by cuvmm objects status, and the one before stays in force.

Flags:
`

// brokerRole is the hidden command with which serve starts the broker. Descriptor 3 is the connection
// to the keeper, and 4 the socket.
const brokerRole = "broker"

// copyRole is the hidden command with which the broker copies memory.
const copyRole = "broker-copy"

// runCopy copies memory for a broker.
func runCopy(f *flag.FlagSet) func(args []string, out io.Writer, h host) (int, error) {
	driver := driverFlag(f)
	return func(_ []string, _ io.Writer, h host) (int, error) {
		c, err := peer.Inherit(os.NewFile(3, "the broker"), peer.Options{})
		if err != nil {
			return exitUsage, fmt.Errorf("%w (%s is for cuvmm serve's own use)", err, copyRole)
		}
		sys, err := h.open(*driver)
		if err != nil {
			return exitFailed, errors.Join(err, c.Close())
		}
		if err := errors.Join(broker.RunCopy(context.Background(), sys, c), c.Close(), sys.Close()); err != nil {
			return exitFailed, err
		}
		return exitOK, nil
	}
}

// socketVariable passes the number of the socket to the program that replaces a keeper.
const socketVariable = "CUVMM_KEEPER_SOCKET"

// brokerFlags are the flags of serve that the broker gets.
type brokerFlags struct {
	driver, policy *string
	limit, each    *int
	returning      *time.Duration
}

func newBrokerFlags(f *flag.FlagSet) brokerFlags {
	return brokerFlags{
		driver:    driverFlag(f),
		limit:     f.Int("limit", 0, "the most `MiB` of all objects; 0 for no limit"),
		policy:    f.String("policy", "", "the policy's `file`; without it every process of this user may do everything"),
		each:      f.Int("limit-per-user", 0, "the most `MiB` of the objects of a user, without a policy; 0 for no limit"),
		returning: f.Duration("return", 10*time.Second, "how long the clients of an earlier broker have to come back"),
	}
}

// mostMiB bounds a limit: no device has 2^60 bytes.
const mostMiB = 1 << 40

// options returns those of the broker, and its policy's file, if there is one.
func (b brokerFlags) options() (o broker.Options, p *policyFile, err error) {
	o = broker.Options{Limit: *b.limit << 20, Return: *b.returning}
	switch {
	case *b.limit < 0 || *b.each < 0 || *b.returning < 0:
		return o, nil, errors.New("a negative limit: use 0 for none")
	case max(*b.limit, *b.each) > mostMiB:
		return o, nil, fmt.Errorf("a limit of %d MiB, where %d are the most: use 0 for none", max(*b.limit, *b.each), mostMiB)
	case *b.policy != "" && *b.each > 0:
		return o, nil, errors.New("-policy and -limit-per-user exclude each other: a policy has limits")
	case *b.policy != "":
		p = &policyFile{path: *b.policy}
		o.Authorize, o.Warning = p.authorize, p.warning
	case *b.each > 0:
		all := broker.Grant{Access: publish.WriteAccess, Quota: broker.Quota{Bytes: *b.each << 20}}
		o.Authorize = func(broker.Caller, string) broker.Grant { return all }
	}
	return o, p, checkChoice(*b.driver)
}

// socketOptions are those of the socket: with a policy that alone says who is served.
func (b brokerFlags) socketOptions() peer.Options {
	if *b.policy == "" {
		return peer.Options{}
	}
	return peer.Options{Shared: true, Allow: func(peer.Credentials) error { return nil }}
}

func serveObjects(f *flag.FlagSet) func(args []string, out io.Writer, h host) (int, error) {
	path := f.String("socket", defaultSocket(), "the `path` of the socket")
	flags := newBrokerFlags(f)
	return func(_ []string, out io.Writer, h host) (int, error) {
		_, policy, err := flags.options()
		if err != nil { // before anything is started
			return exitUsage, err
		}
		if policy != nil {
			if err := policy.load(); err != nil {
				return exitFailed, err
			}
		}
		if err := keep(h, *path, flags, plain{out}); err != nil {
			return exitFailed, err
		}
		return exitOK, nil
	}
}

// keep is the keeper: it runs brokers until it is told to end, or to replace itself.
func keep(h host, path string, flags brokerFlags, out io.Writer) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT) // before there is a socket
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	k, err := keeper.Inherit()
	if err != nil {
		return err
	}
	if k == nil {
		k = keeper.New()
	}
	defer func() { err = errors.Join(err, k.Close()) }()
	socket, end, err := brokerSocket(h, path, flags.socketOptions())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	restart, replace := make(chan os.Signal, 1), make(chan os.Signal, 1)
	fmt.Fprintf(out, "serving at %s\n", path)
	o := keeper.RunOptions{Log: log, Restart: restart, Command: func() *exec.Cmd {
		c, err := h.child(*flags.driver, brokerRole, "-limit", strconv.Itoa(*flags.limit), "-limit-per-user", strconv.Itoa(*flags.each), "-return", flags.returning.String(), "-policy", *flags.policy)
		if err != nil {
			return &exec.Cmd{Err: err}
		}
		c.ExtraFiles = []*os.File{socket}
		c.Stderr = os.Stderr
		return c
	}}
	for {
		signal.Notify(restart, syscall.SIGHUP)
		signal.Notify(replace, syscall.SIGUSR2)
		switch replaced, err := runUntil(ctx, k, o, replace); {
		case err != nil:
			return err
		case !replaced:
			return k.Store()
		}
		signal.Ignore(syscall.SIGHUP, syscall.SIGUSR2) // the next program inherits that: they would end it until it takes them
		self, err := os.Executable()
		if err == nil { // Exec returns if it failed
			err = k.Exec(self, os.Args, append(os.Environ(), socketVariable+"="+strconv.Itoa(int(socket.Fd()))), socket)
		}
		log.Error("cuvmm: the keeper was not replaced, and goes on", "error", err)
	}
}

// runUntil runs brokers until the context ends, or the keeper is to be replaced.
func runUntil(ctx context.Context, k *keeper.Keeper, o keeper.RunOptions, replace <-chan os.Signal) (replaced bool, err error) {
	running, cancel := context.WithCancel(ctx)
	told := make(chan bool, 1)
	go func() {
		defer cancel()
		select {
		case <-replace:
			told <- true
		case <-running.Done():
			told <- false
		}
	}()
	err = k.Run(running, o)
	cancel()
	return <-told && ctx.Err() == nil, err
}

// brokerSocket returns the listening socket, which is inherited or made, and what ends it.
func brokerSocket(h host, path string, o peer.Options) (f *os.File, end func() error, err error) {
	if number, there := h.env(socketVariable); there { // from the program that this one replaces
		n, err := strconv.Atoi(number)
		if err != nil {
			return nil, nil, fmt.Errorf("%s=%q: %w", socketVariable, number, err)
		}
		f = os.NewFile(uintptr(n), path)
		return f, f.Close, os.Unsetenv(socketVariable)
	}
	for _, n := range keeper.Passed() {
		f = os.NewFile(uintptr(n), "the service manager's socket")
		return f, f.Close, nil
	}
	l, err := peer.Listen(filepath.Dir(path), filepath.Base(path), o)
	if err != nil {
		return nil, nil, err
	}
	if f, err = l.File(); err != nil {
		return nil, nil, errors.Join(err, l.Close())
	}
	return f, func() error { return errors.Join(f.Close(), l.Close()) }, nil
}

// runBroker is the broker.
func runBroker(f *flag.FlagSet) func(args []string, out io.Writer, h host) (int, error) {
	flags := newBrokerFlags(f)
	return func(_ []string, _ io.Writer, h host) (int, error) {
		o, policy, err := flags.options()
		if err != nil {
			return exitUsage, err
		}
		if err := serveAs(h, flags, o, policy); err != nil {
			return exitFailed, err
		}
		return exitOK, nil
	}
}

func serveAs(h host, flags brokerFlags, o broker.Options, policy *policyFile) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	signal.Ignore(syscall.SIGINT, syscall.SIGHUP) // a terminal sends them to both: the keeper decides
	c, err := peer.Inherit(os.NewFile(3, "the keeper"), peer.Options{MaxFDs: peer.MaxFDs})
	if err != nil {
		return fmt.Errorf("%w (%s is for cuvmm serve's own use)", err, brokerRole)
	}
	l, err := peer.InheritListener(os.NewFile(4, "the socket"), flags.socketOptions())
	if err != nil {
		return err
	}
	o.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	o.Copy = func() *exec.Cmd {
		p, err := h.child(*flags.driver, copyRole)
		if err != nil {
			return &exec.Cmd{Err: err}
		}
		p.Stderr = os.Stderr
		return p
	}
	if policy != nil {
		if err := policy.load(); err != nil { // it serves those who have objects
			o.Log.Error("cuvmm: the policy cannot be used; nothing is granted until it can", "error", err)
		}
		go policy.watch(ctx, o.Log)
	}
	sys, err := h.open(*flags.driver)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	o.Keeper = keeper.NewClient(c)
	b, err := broker.New(ctx, sys, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	return b.Serve(ctx, l)
}
