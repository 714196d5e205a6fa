//go:build linux && (amd64 || arm64)

package sim

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
)

// onFabric is a machine with two devices in a folder, as a process with a place
// on the fabric sees it.
func onFabric(folder string, f Fabric, visible ...int) Options {
	return Options{
		Folder: folder, Fabric: f, Visible: visible,
		Devices: []DeviceOptions{{Memory: 8 * chunk}, {Memory: 8 * chunk}},
	}
}

const fdAndFabric = driver.HandlePosixFD | driver.HandleFabric

// errands of the child "sim: fabric".
type fabricErrand struct {
	Do     string // create, import, release
	Device int32
	Types  driver.HandleTypes
	Handle driver.ShareableHandle
}

type fabricAnswer struct {
	Result driver.Result
	Handle driver.ShareableHandle
	First  byte // of the memory
}

func init() {
	// A process on the fabric: it creates memory that holds the pattern, or
	// imports it, or releases what it has.
	reexec.Register("sim: fabric", func(c *reexec.Child) error {
		var o Options
		if err := json.Unmarshal([]byte(c.Args[0]), &o); err != nil {
			return err
		}
		m, err := New(o)
		if err != nil {
			return err
		}
		d := driver.Of(m)
		d.Init()
		p, _ := d.MemAddressReserve(chunk, 0, 0)
		var h driver.MemHandle
		for {
			var e fabricErrand
			if err := c.Recv(&e); err != nil {
				return nil
			}
			var a fabricAnswer
			switch e.Do {
			case "create":
				h, a.Result = d.MemCreate(chunk, on(e.Device, e.Types))
			case "import":
				h, a.Result = d.MemImportFromShareableHandle(e.Handle, driver.HandleFabric)
			case "release":
				d.MemUnmap(p, chunk)
				a.Result = d.MemRelease(h)
			}
			if a.Result == driver.Success && e.Do != "release" {
				if r := d.MemMap(p, chunk, 0, h); r != driver.Success {
					return fmt.Errorf("map: %v", r)
				}
				if e.Do == "create" {
					if err := m.Poke(cuda.Ptr(p), repeated(0x5e, chunk)); err != nil {
						return err
					}
					a.Handle, a.Result = d.MemExportToShareableHandle(h, driver.HandleFabric)
				}
				b, err := m.Bytes(cuda.Ptr(p), 1)
				if err != nil {
					return err
				}
				a.First = b[0]
			}
			if err := c.Send(a); err != nil {
				return err
			}
		}
	})
}

func fabricProcess(t *testing.T, o Options) *reexec.Cmd {
	text, err := json.Marshal(o)
	require.NoError(t, err)
	c := reexec.Command(t, "sim: fabric", string(text))
	c.Start()
	return c
}

func ask(c *reexec.Cmd, e fabricErrand) (a fabricAnswer) {
	c.Send(e)
	c.Recv(&a)
	return a
}

// What an import returns, by the state that the processes are in.
func TestFabricHandles(t *testing.T) {
	here := Fabric{Channels: []int{0, 3}, Cluster: [16]byte{1}, Clique: 7}
	elsewhere := func(change func(f *Fabric)) Fabric {
		f := here
		change(&f)
		return f
	}
	for _, row := range []struct {
		state    string
		importer Fabric
		sees     []int
		types    driver.HandleTypes
		between  func(exporter *reexec.Cmd) // creation and import
		want     driver.Result
	}{
		{state: "the same channel", importer: here, want: driver.Success},
		{state: "with descriptors too", importer: here, types: fdAndFabric, want: driver.Success},
		{state: "the device under another ordinal", importer: here, sees: []int{1}, want: driver.Success},
		{state: "no channel", importer: elsewhere(func(f *Fabric) { f.Channels = nil }), want: driver.NotSupported},
		{state: "another channel", importer: elsewhere(func(f *Fabric) { f.Channels = []int{3} }), want: driver.NotPermitted},
		{state: "another clique", importer: elsewhere(func(f *Fabric) { f.Clique = 8 }), want: driver.InvalidHandle},
		{state: "another cluster", importer: elsewhere(func(f *Fabric) { f.Cluster[15] = 1 }), want: driver.InvalidHandle},
		{state: "the device is hidden", importer: here, sees: []int{0}, want: driver.InvalidDevice},
		{state: "the memory is released", importer: here, want: driver.InvalidHandle, between: func(e *reexec.Cmd) { ask(e, fabricErrand{Do: "release"}) }},
		{state: "the exporter is killed", importer: here, want: driver.InvalidHandle, between: func(e *reexec.Cmd) { e.Kill() }},
		{state: "the exporter has ended", importer: here, want: driver.InvalidHandle, between: func(e *reexec.Cmd) { e.Wait() }},
	} {
		t.Run(row.state, func(t *testing.T) {
			folder := t.TempDir()
			exporter := fabricProcess(t, onFabric(folder, here))
			types := row.types | driver.HandleFabric
			made := ask(exporter, fabricErrand{Do: "create", Device: 1, Types: types})
			require.Equal(t, driver.Success, made.Result)
			importer := fabricProcess(t, onFabric(folder, row.importer, row.sees...))
			if row.between != nil {
				row.between(exporter)
			}
			got := ask(importer, fabricErrand{Do: "import", Handle: made.Handle})
			require.Equal(t, row.want.String(), got.Result.String())
			used := func() int {
				u, err := Inspect(folder)
				require.NoError(t, err)
				return u.Devices[1].Taken
			}
			if row.want != driver.Success {
				exporter.Kill()
				require.Zero(t, used(), "the handle holds nothing")
				return
			}
			// From now on the importer holds the memory by itself.
			require.EqualValues(t, 0x5e, got.First)
			exporter.Kill()
			require.Equal(t, chunk, used())
			third := fabricProcess(t, onFabric(folder, here))
			require.Equal(t, driver.InvalidHandle, ask(third, fabricErrand{Do: "import", Handle: made.Handle}).Result, "but gives it to no other process")
			importer.Kill()
			require.Zero(t, used())
			noFiles(t, folder)
		})
	}
}

func TestFabricHandlesInOneProcess(t *testing.T) {
	folder, f := t.TempDir(), Fabric{Channels: []int{5}}
	r, other := start(t, onFabric(folder, f)), start(t, onFabric(t.TempDir(), f))
	h := r.create(chunk, on(0, fdAndFabric))
	first, res := r.MemExportToShareableHandle(h, driver.HandleFabric)
	r.ok(res)
	file := r.export(h)
	for range 2 {
		i, res := r.MemImportFromShareableHandle(first, driver.HandleFabric)
		r.ok(res)
		prop, res := r.MemGetAllocationPropertiesFromHandle(i)
		r.ok(res)
		require.Equal(t, on(0, 0), prop)
		_, res = r.MemExportToShareableHandle(i, driver.HandleFabric)
		r.is(driver.InvalidValue, res)
		r.ok(r.MemRelease(i))
	}
	_, res = other.MemImportFromShareableHandle(first, driver.HandleFabric)
	other.is(driver.InvalidHandle, res)
	for _, at := range []int{0, 16, 63} {
		forged := first
		forged[at] ^= 1
		_, res = r.MemImportFromShareableHandle(forged, driver.HandleFabric)
		r.is(driver.InvalidHandle, res)
	}
	_, res = r.MemImportFromShareableHandle(first, driver.HandlePosixFD)
	r.is(driver.Unknown, res)

	// What only has descriptors cannot be had by guessing its handle.
	plain := r.create(chunk, on(0, driver.HandlePosixFD))
	_, res = r.MemExportToShareableHandle(plain, driver.HandleFabric)
	r.is(driver.InvalidValue, res)
	r.export(plain).Close()
	r.m.mu.Lock()
	guessed := r.m.fabricHandle(r.m.handles[plain].mem.id)
	r.m.mu.Unlock()
	_, res = r.MemImportFromShareableHandle(guessed, driver.HandleFabric)
	r.is(driver.InvalidHandle, res)

	r.ok(r.MemRelease(plain))
	r.ok(r.MemRelease(h))
	_, res = r.MemImportFromShareableHandle(first, driver.HandleFabric)
	r.is(driver.InvalidHandle, res)
	i, res := r.importFD(file)
	r.ok(res)
	_, res = r.MemImportFromShareableHandle(first, driver.HandleFabric)
	r.is(driver.InvalidHandle, res)
	r.ok(r.MemRelease(i))
}

func TestWhoCanMakeMemoryForTheFabric(t *testing.T) {
	channel := Fabric{Channels: []int{0}}
	without := onFabric(t.TempDir(), channel)
	without.Devices = []DeviceOptions{{Attributes: map[int]int{int(driver.AttrHandleFabric): 0}}}
	for _, row := range []struct {
		what    string
		options Options
		prop    driver.AllocationProp
		want    driver.Result
	}{
		{"an open channel", onFabric(t.TempDir(), channel), on(0, driver.HandleFabric), driver.Success},
		{"an open channel, both types", onFabric(t.TempDir(), channel), on(0, fdAndFabric), driver.Success},
		{"no channel, though there is a folder", onFabric(t.TempDir(), Fabric{}), on(0, fdAndFabric), driver.NotPermitted},
		{"no channel, no folder", Options{}, on(0, driver.HandleFabric), driver.NotPermitted},
		{"a device without fabric handles", without, on(0, driver.HandleFabric), driver.NotSupported},
		{"host memory", onFabric(t.TempDir(), channel), at(driver.LocationHostNUMA, 0, driver.HandleFabric), driver.NotSupported},
		{"host memory, no channel", Options{}, at(driver.LocationHostNUMA, 0, driver.HandleFabric), driver.NotPermitted},
	} {
		t.Run(row.what, func(t *testing.T) {
			r := start(t, row.options)
			reads, res := r.DeviceGetAttribute(driver.AttrHandleFabric, 0)
			r.ok(res)
			require.Equal(t, row.want != driver.NotSupported || row.prop.Location.Type != driver.LocationDevice, reads == 1,
				"the attribute does not know of channels")
			h, res := r.MemCreate(chunk, row.prop)
			r.is(row.want, res)
			if res == driver.Success {
				r.ok(r.MemRelease(h))
			}
		})
	}
	_, err := New(Options{Fabric: channel})
	require.ErrorContains(t, err, "there is no Folder")
}
