package keeper

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/environ"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/fd"
	"github.com/cuvmm/cuvmm/internal/sealedfile"
)

// A service manager keeps files for a service between its end and its next start. It knows them by name:
// each file of an entry has one of its own, and so has the file that says which belong to which entry.
const (
	storedEntries = "cuvmm-entries"
	storedFile    = "cuvmm-file-"
)

// storeTimeout bounds how long a service manager takes for what it is sent.
const storeTimeout = 10 * time.Second

// Store has the service manager (systemd, with FileDescriptorStoreMax) keep the files for the next
// process of the service, which finds them with [Inherit]. Without a manager it does nothing. No Serve
// and no Run may run; the caller closes the keeper then.
func (k *Keeper) Store() error {
	const op = "keeper.Keeper.Store"
	m, err := dialManager()
	if m == nil {
		return err
	}
	defer func() { _ = m.Close() }()
	k.mu.Lock()
	defer k.mu.Unlock()
	count := 0
	text, err := k.save(func(n int) (int, error) {
		count++
		return count, m.tell("FDSTORE=1\nFDPOLL=0\nFDNAME="+storedFile+strconv.Itoa(count), n)
	})
	if err == nil {
		var n int
		if n, err = sealedfile.New("cuvmm keeper", text); err == nil {
			err = m.tell("FDSTORE=1\nFDPOLL=0\nFDNAME="+storedEntries, n)
			_ = fd.Close(n)
		}
	}
	if err == nil {
		err = m.settle()
	}
	if err != nil {
		return errs.PeerCause(err, op, nil, "the service manager's store", "see what the manager says, and FileDescriptorStoreMax of the unit")
	}
	return nil
}

// stored returns the keeper that Store left to this process, or nil, and has the manager forget it.
func stored() (*Keeper, error) {
	const op = "keeper.Inherit"
	files := passed()
	n, there := files[storedEntries]
	if !there {
		return nil, nil
	}
	defer func() { _ = fd.Close(n) }()
	text, err := sealedfile.Read(n, maxSaved)
	if err != nil {
		return nil, errs.SystemCall(op, "the file with the entries", err)
	}
	k, err := restore(text, func(i int) (*peer.FD, error) {
		n, there := files[storedFile+strconv.Itoa(i)]
		if !there {
			return nil, fmt.Errorf("file %d is not among those of the store: raise FileDescriptorStoreMax of the unit", i)
		}
		return peer.NewFD(n)
	})
	if err != nil {
		return nil, err
	}
	m, err := dialManager()
	if m == nil {
		return k, err
	}
	defer func() { _ = m.Close() }()
	for name := range files { // else it would keep the memory of objects that have ended
		if isStored(name) {
			err = errs.Both(err, m.tell("FDSTOREREMOVE=1\nFDNAME="+name))
		}
	}
	return k, err
}

// Passed returns the files that a service manager passed to this process by their names, such as a listening
// socket, without those that [Inherit] takes.
func Passed() map[string]int {
	all := passed()
	maps.DeleteFunc(all, func(name string, _ int) bool { return isStored(name) })
	return all
}

func isStored(name string) bool { return name == storedEntries || strings.HasPrefix(name, storedFile) }

func passed() map[string]int {
	if environ.Get("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil
	}
	n, _ := strconv.Atoi(environ.Get("LISTEN_FDS"))
	names := strings.Split(environ.Get("LISTEN_FDNAMES"), ":")
	all := map[string]int{}
	for i := range n {
		name := "unknown"
		if i < len(names) && names[i] != "" {
			name = names[i]
		}
		all[name] = 3 + i
	}
	return all
}

// manager is a connection to the service manager.
type manager struct{ *net.UnixConn }

// dialManager returns nil if no manager runs this process.
func dialManager() (*manager, error) {
	path := environ.Get("NOTIFY_SOCKET")
	if path == "" {
		return nil, nil
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, err
	}
	return &manager{c}, c.SetWriteDeadline(time.Now().Add(storeTimeout))
}

func (m *manager) tell(text string, files ...int) error {
	var rights []byte
	if len(files) > 0 {
		rights = syscall.UnixRights(files...)
	}
	raw, err := m.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	err = raw.Write(func(n uintptr) bool { // WriteMsgUnix wants an address
		sent = syscall.Sendmsg(int(n), []byte(text), rights, nil, 0)
		return !errors.Is(sent, syscall.EAGAIN)
	})
	if err == nil {
		err = sent
	}
	return err
}

// settle waits until the manager has read everything: it drops messages of a process that has ended.
func (m *manager) settle() error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	err = m.tell("BARRIER=1", int(w.Fd()))
	_ = w.Close()
	if err == nil {
		err = r.SetReadDeadline(time.Now().Add(storeTimeout))
	}
	if err != nil {
		return err
	}
	if _, err := r.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	return nil // the manager has closed its end
}
