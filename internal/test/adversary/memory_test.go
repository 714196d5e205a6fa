//go:build linux

package adversary

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func init() {
	// A receiver of memory, which then shows that its machine still works.
	reexec.Register("adversary: receiver", func(c *reexec.Child) error {
		sys, err := machine("")
		if err != nil {
			return err
		}
		conn, err := peer.Inherit(c.Files[0], peer.Options{})
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
		defer cancel()
		d := sys.Devices()[0]
		b, err := handles.ReceiveBuffer(ctx, conn, d, handles.ImportOptions{})
		n := news{Progress: err == nil, Err: fmt.Sprint(err)}
		if b != nil {
			all, bad := b.Slice(0, b.Len())
			got := make([]byte, b.Len())
			err = errors.Join(bad, all.CopyTo(nil, got), b.Close())
		} else {
			err = nil
		}
		own, bad := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: chunk})
		if bad != nil {
			return bad
		}
		_, bad = own.AppendUndefined(chunk)
		err = errors.Join(err, bad, own.Close(), conn.Close(), sys.Close())
		if open := peer.OpenFDs(); open != 0 {
			err = errors.Join(err, fmt.Errorf("%d descriptors stay open", open))
		}
		return errors.Join(err, c.Send(n))
	})
}

// genuine is exported memory of a machine here: its file's bytes, of which the last
// page is the label, and the device that it lies on.
func genuine(t *testing.T) (content []byte, device cuda.UUID) {
	t.Helper()
	sys, err := machine("")
	require.NoError(t, err)
	d := sys.Devices()[0]
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: chunk, Chunks: vmm.FixedChunks(chunk), Memory: vmm.Properties{Handles: vmm.PosixFD}})
	require.NoError(t, err)
	_, err = b.AppendUndefined(chunk)
	require.NoError(t, err)
	lease, err := handles.LeaseBuffer(b, handles.LeaseOptions{Handle: vmm.PosixFD})
	require.NoError(t, err)
	require.NoError(t, lease.Offer().Files[0].Use(func(n int) error {
		var s unix.Stat_t
		if err := unix.Fstat(n, &s); err != nil {
			return err
		}
		content = make([]byte, s.Size)
		_, err := unix.Pread(n, content, 0)
		return err
	}))
	require.NoError(t, errors.Join(lease.Close(), b.Close(), sys.Close()))
	return content, d.UUID()
}

// forged returns a memory file with a content, and seals.
func forged(t *testing.T, content []byte, flags, seals int) int {
	t.Helper()
	f := memfd(t, int64(len(content)), flags, 0)
	if flags&unix.MFD_HUGETLB == 0 {
		_, err := unix.Pwrite(f, content, 0)
		require.NoError(t, err)
	}
	if seals != 0 {
		_, err := unix.FcntlInt(uintptr(f), unix.F_ADD_SEALS, seals)
		require.NoError(t, err)
	}
	return f
}

// Whatever comes in place of memory, or is odd memory: the receiver takes it or
// refuses it, and its machine goes on.
func TestOddMemory(t *testing.T) {
	good, device := genuine(t)
	whole := func() int { return forged(t, good, 0, sealed) }
	label := func(change func(l []byte)) int {
		odd := bytes.Clone(good)
		change(odd[len(odd)-4096:])
		return forged(t, odd, 0, sealed)
	}
	rows := map[string]int{
		"genuine":                   whole(),
		"unsealed":                  forged(t, good, 0, 0),
		"sealed against writing":    forged(t, good, 0, sealed|unix.F_SEAL_WRITE),
		"sealed against new writes": forged(t, good, 0, sealed|unix.F_SEAL_FUTURE_WRITE),
		"smaller than it says":      forged(t, good[len(good)-4096-4096:], 0, sealed),
		"a label alone":             forged(t, good[len(good)-4096:], 0, sealed),
		"no label":                  label(func(l []byte) { clear(l) }),
		"nothing":                   memfd(t, 0, 0, sealed),
	}
	huge := memfd(t, 1<<50, 0, sealed)
	rows["of 1 PiB"] = huge
	if f, err := unix.MemfdCreate("huge", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_HUGETLB); err == nil {
		f = file(t, f, nil)
		if unix.Ftruncate(f, 4<<20) == nil { // pages that are not there
			_, err := unix.FcntlInt(uintptr(f), unix.F_ADD_SEALS, sealed)
			require.NoError(t, err)
			rows["of huge pages"] = f
		}
	}
	locked := whole()
	require.NoError(t, unix.Flock(locked, unix.LOCK_EX))
	rows["locked by its sender"] = locked
	for name, flags := range map[string]int{"a path of memory": unix.O_PATH, "read-only": unix.O_RDONLY} {
		f, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", whole()), flags|unix.O_CLOEXEC, 0)
		rows[name] = file(t, f, err)
	}
	for at := range 80 { // each byte of the label in turn
		if at%8 == 0 || times(1) > 1 {
			rows[fmt.Sprintf("byte %d of the label", at)] = label(func(l []byte) { l[at] ^= 0xff })
		}
	}
	for name, f := range oddFiles(t) {
		rows[name] = f
	}
	for name, f := range rows {
		t.Run(name, func(t *testing.T) { receives(t, f, device, name == "genuine") })
	}
}

// receives sends a descriptor to a receiver in a process of its own.
func receives(t *testing.T, f int, device cuda.UUID, takes bool) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	w := wireOf(pair[0])
	defer w.close()
	far := os.NewFile(uintptr(pair[1]), "receiver")
	c := reexec.Command(t, "adversary: receiver")
	c.Timeout = testTimeout
	c.ExtraFiles = []*os.File{far}
	c.Start()
	require.NoError(t, far.Close())
	require.NoError(t, w.greet())
	d := handles.Descriptor{Kind: handles.BufferKind, Length: chunk, Chunks: []int{chunk}, Location: cuda.Location{Type: cuda.LocationDevice},
		Device: device, Handle: vmm.PosixFD, Exporter: handles.Self()}
	text, err := d.MarshalBinary()
	require.NoError(t, err)
	require.NoError(t, w.send(offer, append([]byte{1, 0, 0, 0}, text...)))
	require.NoError(t, w.send(chunks, []byte{1, 0, 0, 0, 0, 0, 0, 0}, f))
	for {
		p, err := w.recv(testTimeout)
		if err != nil {
			break
		}
		p.close()
		if p.kind == mapped {
			require.NoError(t, w.send(confirmed, []byte{1, 0, 0, 0}))
		} else if p.kind != soon {
			break
		}
	}
	var n news
	c.Recv(&n)
	if takes {
		require.True(t, n.Progress, "%+v", n)
	}
	c.Wait()
}
