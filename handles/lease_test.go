//go:build linux

package handles_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/peertest"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// sentAsText is the offer as a receiver reads it.
func sentAsText(t testing.TB, o handles.Offer) (back handles.Offer) {
	t.Helper()
	text, err := o.MarshalText()
	require.NoError(t, err)
	require.NoError(t, back.UnmarshalText(text))
	return back
}

func TestALeaseKeepsWhatItOffers(t *testing.T) {
	folder := t.TempDir()
	devices, _ := onFabric(t, folder, inClique, inClique)
	b := shareable(t, devices[0], vmm.Fabric, 3, 5)
	before := handles.Leases()
	l, err := handles.LeaseBuffer(b, handles.LeaseOptions{Receivers: 2})
	require.NoError(t, err)
	closeLater(t, l)
	require.Equal(t, before.Open+1, handles.Leases().Open)
	require.Equal(t, before.Bytes+6*mib, handles.Leases().Bytes)
	offer := sentAsText(t, l.Offer())
	require.Equal(t, l.Offer(), offer)
	// The buffer may go: the lease has the memory.
	require.NoError(t, b.Close())
	i, err := handles.ImportBuffer(devices[1], offer, handles.ImportOptions{})
	require.NoError(t, err)
	holds(t, i, 5)
	require.NoError(t, l.Imported(offer.Receipt()))
	require.NoError(t, l.Imported(offer.Receipt()), "the same process counts once")
	other := offer.Receipt()
	other.Importer.PID++
	require.ErrorIs(t, l.Imported(handles.Receipt{Importer: other.Importer}), handles.ErrMismatch)
	require.Equal(t, 3, devices[0].System().Stats().Allocations)
	require.NoError(t, l.Imported(other))
	require.NoError(t, l.Wait(t.Context()))
	require.Zero(t, devices[0].System().Stats().Allocations)
	require.Equal(t, before, handles.Leases())
	require.NoError(t, l.Imported(other), "late, and all had imported")
	for _, printed := range []string{l.String(), fmt.Sprintf("%v", l), fmt.Sprintf("%+v", struct{ L *handles.Lease }{l}), fmt.Sprintf("%#v", l)} {
		require.NotContains(t, printed, fmt.Sprint(offer.Handles[0][:8])[1:10], "a handle is not printed")
		require.Contains(t, printed, "lease of a buffer of")
	}
	// The importer retains it; for other processes the handle names nothing.
	holds(t, i, 5)
	_, err = handles.ImportBuffer(devices[1], offer, handles.ImportOptions{})
	require.Error(t, err)
	require.ErrorContains(t, err, "does it hold a lease")
	require.NoError(t, i.Close())
	require.NoError(t, l.Close())
}

func TestALeaseEndsAtItsDeadline(t *testing.T) {
	devices, _ := onFabric(t, t.TempDir(), inClique)
	b := shareable(t, devices[0], vmm.Fabric, 2, 5)
	before := handles.Leases()
	var log bytes.Buffer
	l, err := handles.LeaseBuffer(b, handles.LeaseOptions{Receivers: 3, Log: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	require.NoError(t, b.Close())
	require.NoError(t, l.Imported(l.Offer().Receipt()))
	released := l.Released()
	select {
	case <-released.Done():
		require.FailNow(t, "released before its end")
	default:
	}
	handles.Expire(l)
	require.NoError(t, released.Wait(peertest.Context(t)))
	err = l.Wait(peertest.Context(t))
	require.ErrorIs(t, err, peer.ErrTimeout)
	require.ErrorContains(t, err, "1 of 3 receivers")
	require.ErrorIs(t, l.Imported(l.Offer().Receipt()), peer.ErrTimeout)
	require.Zero(t, devices[0].System().Stats().Allocations, "the memory is free")
	require.NoError(t, l.Close())
	require.ErrorIs(t, l.Wait(t.Context()), peer.ErrTimeout)
	require.Equal(t, before.Expired+1, handles.Leases().Expired)
	b = shareable(t, devices[0], vmm.Fabric, 2, 5)
	other, err := handles.LeaseBuffer(b, handles.LeaseOptions{Timeout: time.Millisecond})
	require.NoError(t, err)
	require.ErrorIs(t, other.Wait(peertest.Context(t)), peer.ErrTimeout)
	require.NoError(t, b.Close())
	require.Contains(t, log.String(), "before all receivers had imported")
	text, err := l.Offer().MarshalText()
	require.NoError(t, err)
	require.NotContains(t, log.String(), string(text[20:60]))
}

func TestLeasesByDescriptor(t *testing.T) {
	gputest.Each(t, func(t *testing.T, d *cuda.Device) {
		a, err := vmm.NewArray[int32](d, vmm.BufferOptions{Reserve: 8 * mib})
		require.NoError(t, err)
		closeLater(t, a)
		require.NoError(t, gputest.Err(a.Append(nil, []int32{1, 2, 3})))
		files := peer.OpenFDs()
		l, err := handles.LeaseArray(a, handles.LeaseOptions{Handle: vmm.PosixFD})
		require.NoError(t, err)
		offer := sentAsText(t, l.Offer())
		_, err = handles.ImportArray[int32](d, offer, handles.ImportOptions{})
		require.ErrorIs(t, err, handles.ErrDescriptor, "the files are missing")
		offer.Files = l.Offer().Files
		i, err := handles.ImportArray[int32](d, offer, handles.ImportOptions{ReadOnly: true})
		require.NoError(t, err)
		got := make([]int32, 3)
		require.NoError(t, i.All().CopyTo(nil, got))
		require.Equal(t, []int32{1, 2, 3}, got)
		require.NoError(t, i.Close())
		_, err = handles.ImportArray[float32](d, offer, handles.ImportOptions{})
		require.ErrorIs(t, err, handles.ErrMismatch)
		_, err = handles.ImportBuffer(d, offer, handles.ImportOptions{})
		require.ErrorIs(t, err, handles.ErrMismatch)
		require.NoError(t, l.Close())
		require.NoError(t, l.Close())
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for range 20 {
			require.ErrorIs(t, l.Wait(ended), cuda.ErrClosed, "how it ended, whatever the context says")
		}
		require.Equal(t, files, peer.OpenFDs())
		// Without a fabric handle there is nothing to lease by.
		_, err = handles.LeaseArray(a, handles.LeaseOptions{Handle: vmm.Fabric})
		require.ErrorIs(t, err, cuda.ErrNotSupported)
		require.ErrorContains(t, err, "vmm.Fabric")
	})
}

// A lease by more descriptors than may ever be open does not wait for them.
func TestALeaseByTooManyDescriptors(t *testing.T) {
	_, s := sim.Open(t, sim.Options{Devices: []sim.DeviceOptions{{Granularity: 64 << 10}}})
	b, err := vmm.NewBuffer(s.Devices()[0], vmm.BufferOptions{Reserve: 64 * mib, Chunks: vmm.FixedChunks(64 << 10)})
	require.NoError(t, err)
	closeLater(t, b)
	require.NoError(t, gputest.Err(b.AppendUndefined(65*64<<10)))
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 256, Max: old.Max})) // 64 may be open
	defer func() { require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) }()
	// It does not wait until the lease would end.
	_, err = handles.LeaseBuffer(b, handles.LeaseOptions{Handle: vmm.PosixFD, Timeout: 24 * time.Hour})
	require.ErrorIs(t, err, peer.ErrOpenFiles)
	require.ErrorContains(t, err, "65 descriptors")
	require.ErrorContains(t, err, "larger chunks")
}

func TestLeasesThatCannotBe(t *testing.T) {
	devices, machines := onFabric(t, t.TempDir(), inClique)
	d := devices[0]
	before := handles.Leases()
	m := shareable(t, d, vmm.Fabric, 1, 1)
	for _, o := range []handles.LeaseOptions{{Handle: vmm.PosixFD | vmm.Fabric}, {Handle: vmm.NoHandles}, {Receivers: -1}, {Timeout: -1}} {
		_, err := handles.LeaseBuffer(m, o)
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	}
	_, err := handles.LeaseBuffer(nil, handles.LeaseOptions{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	_, err = handles.LeaseArray[int](nil, handles.LeaseOptions{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	remove := machines[0].Inject(sim.Fault{Call: "cuMemExportToShareableHandle", Result: 304})
	_, err = handles.LeaseBuffer(m, handles.LeaseOptions{})
	remove()
	require.Error(t, err)
	// A release that fails at the end is tried again.
	l, err := handles.LeaseBuffer(m, handles.LeaseOptions{})
	require.NoError(t, err)
	i, err := handles.ImportBuffer(d, l.Offer(), handles.ImportOptions{})
	require.NoError(t, err)
	require.NoError(t, i.Close())
	_, err = handles.ImportBuffer(nil, l.Offer(), handles.ImportOptions{})
	require.ErrorIs(t, err, cuda.ErrInvalidArgument)
	require.NoError(t, m.Close())
	machines[0].Inject(sim.Fault{Call: "cuMemRelease", Result: 999})
	require.ErrorContains(t, l.Close(), "Drain")
	require.NoError(t, d.System().Drain(t.Context()))
	require.Zero(t, d.System().Stats().Allocations)
	require.Equal(t, before, handles.Leases())
	_, err = handles.LeaseBuffer(m, handles.LeaseOptions{})
	require.ErrorIs(t, err, cuda.ErrClosed)
}

// A lease ends once, even if several goroutines end it.
func TestLeasesEndOnce(t *testing.T) {
	devices, _ := onFabric(t, t.TempDir(), inClique)
	before := handles.Leases()
	for range 200 {
		m := shareable(t, devices[0], vmm.Fabric, 1, 1)
		l, err := handles.LeaseBuffer(m, handles.LeaseOptions{Receivers: 1, Timeout: 50 * time.Microsecond})
		require.NoError(t, err)
		var all sync.WaitGroup
		all.Go(func() { _ = l.Imported(l.Offer().Receipt()) })
		all.Go(func() { _ = l.Wait(t.Context()) })
		all.Go(func() { _ = l.Close() })
		all.Wait()
		require.NoError(t, m.Close())
	}
	after := handles.Leases()
	require.Equal(t, before.Open, after.Open)
	require.Equal(t, before.Bytes, after.Bytes)
	require.Zero(t, devices[0].System().Stats().Allocations)
}

var someOffer = handles.Offer{
	Descriptor: handles.Descriptor{Kind: handles.BufferKind, Length: 5, Chunks: []int{2 * mib, 4 * mib},
		Location: cuda.OnDevice(0), Device: cuda.UUID{1}, Handle: vmm.Fabric},
	Lease: [16]byte{9}, Handles: []cuda.FabricHandle{{1}, {2}},
}

func TestOfferForms(t *testing.T) {
	require.Equal(t, someOffer, sentAsText(t, someOffer))
	j, err := json.Marshal(someOffer)
	require.NoError(t, err)
	var back handles.Offer
	require.NoError(t, json.Unmarshal(j, &back))
	require.Equal(t, someOffer, back)
	text, err := someOffer.MarshalText()
	require.NoError(t, err)
	// Printed, it has no handles.
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("offer", "offer", someOffer)
	for _, printed := range []string{someOffer.String(), fmt.Sprintf("%v %+v %s", someOffer, someOffer, &someOffer), log.String()} {
		require.NotContains(t, printed, string(text[20:50]))
		require.Contains(t, printed, "6 MiB in 2 chunks by fabric")
	}
	for name, change := range map[string]func(*handles.Offer){
		"a handle too few":        func(o *handles.Offer) { o.Handles = o.Handles[:1] },
		"handles of descriptors":  func(o *handles.Offer) { o.Descriptor.Handle = vmm.PosixFD },
		"two types":               func(o *handles.Offer) { o.Descriptor.Handle = vmm.PosixFD | vmm.Fabric },
		"a descriptor that is no": func(o *handles.Offer) { o.Descriptor.Length = 1 << 40 },
	} {
		o := someOffer
		change(&o)
		_, err := o.MarshalText()
		require.ErrorIs(t, err, handles.ErrDescriptor, name)
	}
	good := string(text)
	coded := strings.TrimPrefix(good, "cuvmmoffer1:")
	require.NotEqual(t, good, coded)
	for name, bad := range map[string]string{
		"nothing":          "",
		"no prefix":        coded,
		"another version":  "cuvmmoffer2:" + coded,
		"a line end":       good + "\n",
		"a line end in it": good[:20] + "\r\n" + good[20:],
		"padding":          good + "==",
		"another alphabet": good[:len(good)-2] + "+/",
		"loose last bits":  good[:len(good)-1] + "B",
		"half":             good[:len(good)/2],
	} {
		require.ErrorIs(t, back.UnmarshalText([]byte(bad)), handles.ErrDescriptor, name)
		require.Equal(t, someOffer, back, name)
	}
	require.ErrorIs(t, back.UnmarshalText(make([]byte, 10<<20)), peer.ErrTooLarge)
	r := handles.Receipt{Lease: [16]byte{9}, Importer: handles.Self()}
	text, err = r.MarshalText()
	require.NoError(t, err)
	var got handles.Receipt
	require.NoError(t, got.UnmarshalText(text))
	require.Equal(t, r, got)
	for _, bad := range []string{"", "cuvmmreceipt1:", string(text[:len(text)-1]), string(text) + "A", string(text) + "\n", strings.Repeat("x", 1000)} {
		require.Error(t, got.UnmarshalText([]byte(bad)), bad)
	}
	require.Equal(t, r, got)
}

func FuzzOfferText(f *testing.F) {
	text, err := someOffer.MarshalText()
	require.NoError(f, err)
	f.Add(text)
	f.Add(text[:len(text)-4])
	f.Fuzz(func(t *testing.T, text []byte) {
		var o handles.Offer
		if err := o.UnmarshalText(text); err != nil {
			require.True(t, errors.Is(err, handles.ErrDescriptor) || errors.Is(err, peer.ErrTooLarge), "%v", err)
			require.Zero(t, o)
			return
		}
		again, err := o.MarshalText()
		require.NoError(t, err)
		require.Equal(t, text, again)
	})
}

// importer is what a child is sent: its place in the fabric, and an offer.
type importer struct {
	Folder  string
	Place   sim.Fabric
	Visible []int
	Offer   *handles.Offer `json:",omitempty"`
}

type imported struct {
	First   []byte
	Err     string
	Code    int
	Receipt handles.Receipt
}

func init() {
	reexec.Register("fabric importer", func(c *reexec.Child) error {
		var o importer
		if err := c.Recv(&o); err != nil {
			return err
		}
		m, err := sim.New(onTwo(o.Folder, o.Place, o.Visible...))
		if err != nil {
			return err
		}
		s, err := m.Open(cuda.Options{})
		if err != nil {
			return err
		}
		var a imported
		b, err := handles.ImportBuffer(s.Devices()[0], *o.Offer, handles.ImportOptions{})
		var e *cuda.Error
		if errors.As(err, &e) {
			a.Code = int(e.Code)
		}
		if err != nil {
			a.Err = err.Error()
		} else {
			a.First, a.Receipt = make([]byte, 100), o.Offer.Receipt()
			part, err := b.Slice(0, 100)
			if err := errors.Join(err, part.CopyTo(nil, a.First), b.Close()); err != nil {
				return err
			}
		}
		return errors.Join(c.Send(a), s.Close(), m.Close())
	})
	reexec.Register("fabric exporter", func(c *reexec.Child) error {
		var o importer
		if err := c.Recv(&o); err != nil {
			return err
		}
		m, err := sim.New(onTwo(o.Folder, o.Place, o.Visible...))
		if err != nil {
			return err
		}
		s, err := m.Open(cuda.Options{})
		if err != nil {
			return err
		}
		b, err := vmm.NewBuffer(s.Devices()[1], vmm.BufferOptions{Memory: vmm.Properties{Handles: vmm.Fabric}})
		if err != nil {
			return err
		}
		if _, err := b.Append(nil, pattern(1000, 3)); err != nil {
			return err
		}
		l, err := handles.LeaseBuffer(b, handles.LeaseOptions{Receivers: 1})
		if err != nil {
			return err
		}
		if err := c.Send(l.Offer()); err != nil {
			return err
		}
		var what string
		if err := c.Recv(&what); err != nil { // the end of the test
			return nil
		}
		if what == "release" {
			if err := errors.Join(l.Close(), b.Close()); err != nil {
				return err
			}
		}
		if err := c.Send("done"); err != nil {
			return err
		}
		_ = c.Recv(&what)
		return nil
	})
}

// onTwo is a machine of two devices in a folder.
func onTwo(folder string, f sim.Fabric, visible ...int) sim.Options {
	return sim.Options{Folder: folder, Fabric: f, Visible: visible, Devices: []sim.DeviceOptions{{Memory: 64 * mib}, {Memory: 64 * mib}}}
}

// The error of a refused import names the obstacle and the remedy, depending on the state
// of the processes.
func TestWhatAnImportByTextSays(t *testing.T) {
	for _, row := range []struct {
		state    string
		importer sim.Fabric
		visible  []int
		between  func(exporter *reexec.Cmd)
		code     int
		says     []string
	}{
		{state: "the same channel", importer: inClique},
		{state: "no channel", importer: noChannel, code: 801, says: []string{"needs an open IMEX channel", "this process has no open channel", "there is no channel in"}},
		{state: "another channel", importer: anotherChannel, code: 800, says: []string{"on the exporter's IMEX channel only", "this process has channel 4"}},
		{state: "another clique", importer: anotherClique, code: 400, says: []string{"are both cluster UUIDs and cliques the same", "clique 01000000-0000-0000-0000-000000000000.8"}},
		{state: "the device is hidden", importer: inClique, visible: []int{0}, code: 101, says: []string{"hidden from this process", "CUDA_VISIBLE_DEVICES"}},
		{state: "the exporter is killed", importer: inClique, between: func(e *reexec.Cmd) { e.Kill() }, code: 400, says: []string{"exporter is gone", "is it alive"}},
		{state: "the memory is released", importer: inClique, between: func(e *reexec.Cmd) {
			var done string
			e.Send("release")
			e.Recv(&done)
		}, code: 400, says: []string{"has released the memory", "does it hold a lease"}},
	} {
		t.Run(row.state, func(t *testing.T) {
			folder := t.TempDir()
			exporter := reexec.Command(t, "fabric exporter")
			exporter.Start()
			exporter.Send(importer{Folder: folder, Place: inClique})
			var offer handles.Offer
			exporter.Recv(&offer)
			if row.between != nil {
				row.between(exporter)
			}
			var got imported
			for end := time.Now().Add(peertest.Guard); ; {
				child := reexec.Command(t, "fabric importer")
				child.Start()
				child.Send(importer{Folder: folder, Place: row.importer, Visible: row.visible, Offer: &offer})
				got = imported{}
				child.Recv(&got)
				child.Wait()
				// A system may take a moment to clean up after a killed process.
				if row.between == nil || got.Code == row.code || time.Now().After(end) {
					break
				}
			}
			require.Equal(t, row.code, got.Code, got.Err)
			for _, s := range row.says {
				require.Contains(t, got.Err, s)
			}
			if row.code == 0 {
				require.Empty(t, got.Err)
				require.Equal(t, pattern(1000, 3)[:100], got.First)
				require.Equal(t, offer.Lease, got.Receipt.Lease)
			}
			exporter.Kill()
		})
	}
}

// A zero Offer is refused by every import.
func TestAZeroOfferIsRefused(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	for op, do := range map[string]func() error{
		"handles.ImportBuffer": func() error { _, err := handles.ImportBuffer(d, handles.Offer{}, handles.ImportOptions{}); return err },
		"handles.ImportArray": func() error {
			_, err := handles.ImportArray[int32](d, handles.Offer{}, handles.ImportOptions{})
			return err
		},
		"handles.Offer.MarshalText": func() error { _, err := handles.Offer{}.MarshalText(); return err },
	} {
		err := do()
		require.ErrorIs(t, err, handles.ErrDescriptor)
		require.EqualError(t, err, op+": invalid descriptor: a zero Offer; take it from Lease.Offer, or read its text with UnmarshalText")
	}
}

// Messages count in the singular too.
func TestMessagesCountOne(t *testing.T) {
	devices, _ := onFabric(t, t.TempDir(), inClique)
	l, err := handles.LeaseBuffer(shareable(t, devices[0], vmm.Fabric, 1, 5), handles.LeaseOptions{Receivers: 1})
	require.NoError(t, err)
	closeLater(t, l)
	require.Contains(t, l.Offer().String(), "in 1 chunk by")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorContains(t, l.Wait(ctx), "imported by 0 of 1 receiver")
	offer := l.Offer()
	offer.Handles = nil
	_, err = handles.ImportBuffer(devices[0], offer, handles.ImportOptions{})
	require.ErrorContains(t, err, "0 handles for 1 chunk;")
	offer.Descriptor.Kind, offer.Descriptor.Element, offer.Descriptor.ElementSize = handles.ArrayKind, handles.Uint8, 1
	_, err = handles.ImportBuffer(devices[0], offer, handles.ImportOptions{})
	require.ErrorContains(t, err, "of 1 byte each")
}
