//go:build linux && (amd64 || arm64)

package sim

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/csrc/kernels"
	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/stretchr/testify/require"
)

// teamIn is a machine in a folder with so many devices on one switch.
func teamIn(folder string, devices int) Options {
	o := WithMulticast(devices)
	o.Folder, o.Fabric = folder, Fabric{Channels: []int{0}}
	for i := range o.Devices {
		o.Devices[i].Memory = 16 * chunk
	}
	return o
}

// step is what a process of a team is told to do.
type step struct {
	Do     string
	Value  uint32
	Fabric *driver.ShareableHandle // of the object; nil: by the descriptor that it inherited
}

type outcome struct {
	Result driver.Result
	Value  uint32
	Fault  string
}

func init() {
	// A process with one device of a team: it imports the object, adds its
	// device, binds memory of its own, and works on it.
	reexec.Register("sim: member of a team", func(c *reexec.Child) error {
		var o Options
		var device int32
		if err := json.Unmarshal([]byte(c.Args[0]), &o); err != nil {
			return err
		}
		if _, err := fmt.Sscan(c.Args[1], &device); err != nil {
			return err
		}
		m, err := New(o)
		if err != nil {
			return err
		}
		d := driver.Of(m)
		d.Init()
		ctx, _ := d.DevicePrimaryCtxRetain(driver.Device(device))
		s, _ := d.StreamCreate(ctx, driver.StreamNonBlocking)
		mod, r := d.ModuleLoadData(ctx, append(append([]byte(nil), kernels.Multimem...), 0))
		if r != driver.Success {
			return fmt.Errorf("load: %v", r)
		}
		own, _ := d.MemAddressReserve(chunk, 0, 0)
		mc, _ := d.MemAddressReserve(chunk, 0, 0)
		never, _ := d.MemHostAlloc(ctx, 8, driver.HostAllocPortable) // ends no wait
		all := []driver.AccessDesc{grant(driver.LocationDevice, device, driver.AccessReadWrite)}
		var object, memory driver.MemHandle
		launch := func(name string, values ...any) driver.Result {
			f, r := d.ModuleGetFunction(ctx, mod, name)
			if r != driver.Success {
				return r
			}
			one := driver.LaunchConfig{GridX: 1, GridY: 1, GridZ: 1, BlockX: 1, BlockY: 1, BlockZ: 1}
			if r := d.LaunchKernel(ctx, f, one, params(values...), s); r != driver.Success {
				return r
			}
			return d.StreamSynchronize(ctx, s)
		}
		for {
			var next step
			if err := c.Recv(&next); err != nil {
				return nil
			}
			var a outcome
			switch next.Do {
			case "import":
				if next.Fabric != nil {
					object, a.Result = d.MemImportFromShareableHandle(*next.Fabric, driver.HandleFabric)
				} else {
					object, a.Result = d.MemImportFromShareableHandle(fdHandle(int(c.Files[0].Fd())), driver.HandlePosixFD)
				}
				for _, f := range c.Files {
					f.Close()
				}
			case "add":
				a.Result = d.MulticastAddDevice(object, driver.Device(device))
			case "bind":
				if memory, a.Result = d.MemCreate(chunk, on(device, fdAndFabric)); a.Result == driver.Success {
					d.MemMap(own, chunk, 0, memory)
					d.MemSetAccess(own, chunk, all)
					a.Result = d.MulticastBindMemV1(object, 0, memory, 0, chunk)
				}
			case "bind what is not shareable":
				h, _ := d.MemCreate(chunk, on(device, 0))
				a.Result = d.MulticastBindMemV1(object, 0, h, 0, chunk)
				d.MemRelease(h)
			case "map":
				if a.Result = d.MemMap(mc, chunk, 0, object); a.Result == driver.Success {
					a.Result = d.MemSetAccess(mc, chunk, all)
				}
			case "set":
				d.Foreign().MemsetD32Async(ctx, own, next.Value, 1, s)
				a.Result = d.StreamSynchronize(ctx, s)
			case "get":
				b, err := m.Bytes(cuda.Ptr(own), 4)
				if err != nil {
					return err
				}
				a.Value = binary.NativeEndian.Uint32(b)
			case "sum":
				a.Result = launch(kernels.U32.AllReduce(), uint64(mc), uint64(1))
			case "barrier":
				a.Result = launch(kernels.Barrier, uint64(mc+64), uint64(own+64), next.Value, uint64(uintptr(never)))
			case "free":
				d.MemUnmap(own, chunk)
				a.Result = d.MemRelease(memory)
			case "unbind":
				a.Result = d.MulticastUnbind(object, driver.Device(device), 0, chunk)
			case "leave":
				d.MemUnmap(mc, chunk)
				a.Result = d.MemRelease(object)
			}
			a.Fault = m.Fault()
			if err := c.Send(a); err != nil {
				return err
			}
		}
	})
}

// crew are the processes of a team.
type crew struct {
	t       *testing.T
	members []*reexec.Cmd
	folder  string
	options string
	object  *os.File
}

// startCrew makes a team of processes, one for each device. The object is made
// by the test, which then keeps no part in it.
func startCrew(t *testing.T, devices int, byFabric bool) *crew {
	t.Helper()
	c := &crew{t: t, folder: t.TempDir()}
	o := teamIn(c.folder, devices)
	m, err := New(o)
	require.NoError(t, err)
	d := driver.Of(m)
	require.Zero(t, d.Init())
	prop := teamOf(devices, chunk)
	prop.HandleTypes = uint64(fdAndFabric)
	object, r := d.MulticastCreate(prop)
	require.Zero(t, r)
	s, r := d.MemExportToShareableHandle(object, driver.HandlePosixFD)
	require.Zero(t, r)
	file := os.NewFile(uintptr(exported(s)), "multicast object")
	var handle *driver.ShareableHandle
	if byFabric {
		f, r := d.MemExportToShareableHandle(object, driver.HandleFabric)
		require.Zero(t, r)
		handle = &f
	}
	text, err := json.Marshal(o)
	require.NoError(t, err)
	c.options, c.object = string(text), file
	t.Cleanup(func() { file.Close() })
	for i := range devices {
		c.members = append(c.members, c.member(i))
	}
	c.all(step{Do: "import", Fabric: handle})
	require.Zero(t, d.MemRelease(object))
	require.NoError(t, m.Close())
	return c
}

// member starts the process of a device.
func (c *crew) member(device int) *reexec.Cmd {
	cmd := reexec.Command(c.t, "sim: member of a team", c.options, fmt.Sprint(device))
	cmd.ExtraFiles = []*os.File{c.object}
	cmd.Start()
	return cmd
}

func (c *crew) tell(i int, s step) (a outcome) {
	c.t.Helper()
	c.members[i].Send(s)
	c.members[i].Recv(&a)
	return a
}

// all has every process do the same at once, and requires success.
func (c *crew) all(s step) (results []outcome) {
	c.t.Helper()
	for _, m := range c.members {
		m.Send(s)
	}
	for _, m := range c.members {
		var a outcome
		m.Recv(&a)
		require.Equal(c.t, driver.Success.String(), a.Result.String(), "%s: %s", s.Do, a.Fault)
		results = append(results, a)
	}
	return results
}

func (c *crew) ready() {
	c.t.Helper()
	c.all(step{Do: "add"})
	c.all(step{Do: "bind"})
	c.all(step{Do: "map"})
}

// nothingLeft says that no memory is taken and no file is left, once the object
// is let go of.
func (c *crew) nothingLeft() {
	c.t.Helper()
	require.NoError(c.t, c.object.Close())
	u, err := Inspect(c.folder)
	require.NoError(c.t, err)
	for i, d := range u.Devices {
		require.Zero(c.t, d.Taken, "device %d: %v", i, u)
	}
	require.Empty(c.t, u.Exported)
	noFiles(c.t, c.folder)
}

func TestATeamOfProcesses(t *testing.T) {
	for name, byFabric := range map[string]bool{"by descriptor": false, "by fabric handle": true} {
		t.Run(name, func(t *testing.T) {
			c := startCrew(t, 3, byFabric)
			c.ready()
			for round := range uint32(3) {
				for i := range c.members {
					c.tell(i, step{Do: "set", Value: 10*uint32(i) + round})
				}
				require.Equal(t, driver.Success, c.tell(1, step{Do: "sum"}).Result)
				for _, a := range c.all(step{Do: "get"}) {
					require.Equal(t, 30+3*round, a.Value)
				}
				// All wait for each other on their devices.
				c.all(step{Do: "barrier", Value: 3 * (round + 1)})
			}
			c.all(step{Do: "unbind"})
			c.all(step{Do: "leave"})
			c.all(step{Do: "free"})
			c.nothingLeft()
		})
	}
}

func TestABindAcrossProcessesBlocksUntilAllDevicesAreAdded(t *testing.T) {
	c := startCrew(t, 2, false)
	require.Equal(t, driver.Success, c.tell(0, step{Do: "add"}).Result)
	require.Equal(t, driver.InvalidValue, c.tell(0, step{Do: "add"}).Result)
	require.Equal(t, driver.InvalidValue, c.tell(0, step{Do: "bind what is not shareable"}).Result, "that is said at once")
	c.members[0].Send(step{Do: "bind"})
	require.Eventually(t, func() bool { // it has made its memory, and blocks
		u, err := Inspect(c.folder)
		require.NoError(t, err)
		return u.Devices[0].Taken == chunk
	}, time.Minute, time.Millisecond)
	time.Sleep(20 * time.Millisecond)
	require.Equal(t, driver.Success, c.tell(1, step{Do: "add"}).Result)
	var a outcome
	c.members[0].Recv(&a)
	require.Equal(t, driver.Success, a.Result)
	c.tell(0, step{Do: "unbind"})
	for _, m := range c.members {
		m.Kill()
	}
	c.nothingLeft()
}

func TestABlockedProcessCanBeKilled(t *testing.T) {
	c := startCrew(t, 2, false)
	c.tell(0, step{Do: "add"})
	c.members[0].Send(step{Do: "map"})
	time.Sleep(10 * time.Millisecond)
	c.members[0].Kill()
	c.members[1].Kill()
	c.nothingLeft()
}

func TestAMemberIsKilled(t *testing.T) {
	c := startCrew(t, 3, false)
	c.ready()
	c.members[2].Kill()
	a := c.tell(0, step{Do: "sum"})
	require.Equal(t, driver.IllegalAddress, a.Result)
	require.Contains(t, a.Fault, "the memory that device 2 had bound at offset 0x0 was freed before it was unbound, or its process has ended")
	// The context is lost, the object is not: a process that starts in the place
	// of the killed one binds there again.
	c.members[2] = c.member(2)
	for _, do := range []string{"import", "bind", "map"} {
		require.Equal(t, driver.Success, c.tell(2, step{Do: do}).Result, do)
	}
	c.tell(1, step{Do: "set", Value: 4})
	c.tell(2, step{Do: "set", Value: 5})
	require.Equal(t, driver.Success, c.tell(1, step{Do: "sum"}).Result)
	require.EqualValues(t, 9, c.tell(2, step{Do: "get"}).Value)
	for _, m := range c.members {
		m.Kill()
	}
	c.nothingLeft()
}

func TestAMemberFreesItsMemoryBeforeItUnbinds(t *testing.T) {
	c := startCrew(t, 2, true)
	c.ready()
	c.all(step{Do: "set", Value: 1})
	require.Equal(t, driver.Success, c.tell(0, step{Do: "sum"}).Result) // which has seen it
	require.Equal(t, driver.Success, c.tell(1, step{Do: "free"}).Result)
	a := c.tell(0, step{Do: "sum"})
	require.Equal(t, driver.IllegalAddress, a.Result)
	require.Contains(t, a.Fault, "was freed before it was unbound")
	require.Equal(t, driver.Success, c.tell(1, step{Do: "unbind"}).Result)
	for _, m := range c.members {
		m.Kill()
	}
	c.nothingLeft()
}

func TestSlotsAreShared(t *testing.T) {
	folder := t.TempDir()
	checkSlots(t, []Options{teamIn(folder, 1), teamIn(folder, 1)}, driver.HandlePosixFD)
	noFiles(t, folder)
	folder = t.TempDir()
	checkSlots(t, []Options{teamIn(folder, 1), teamIn(folder, 1)}, 0)
}

func TestDevicesOfAnotherCliqueStayOut(t *testing.T) {
	folder := t.TempDir()
	other := teamIn(folder, 2)
	other.Fabric.Clique = 5
	r, s := start(t, teamIn(folder, 2)), start(t, other)
	prop := teamOf(2, chunk)
	prop.HandleTypes = uint64(fdAndFabric)
	h, res := r.MulticastCreate(prop)
	r.ok(res)
	f := r.export(h)
	i, res := s.importFD(f)
	s.ok(res)
	s.is(driver.InvalidDevice, s.MulticastAddDevice(i, 0))
	_, res = s.MemExportToShareableHandle(i, driver.HandlePosixFD)
	s.is(driver.InvalidValue, res)
	handle, res := r.MemExportToShareableHandle(h, driver.HandleFabric)
	r.ok(res)
	_, res = s.MemImportFromShareableHandle(handle, driver.HandleFabric)
	s.is(driver.InvalidHandle, res)
	same, res := r.importFD(f)
	r.ok(res)
	r.ok(r.MulticastAddDevice(same, 1))
	r.is(driver.InvalidValue, r.MulticastAddDevice(h, 1))
	r.ok(r.MemRelease(same))
	s.ok(s.MemRelease(i))
	r.ok(r.MemRelease(h))
}

// Without a folder an object stays in its process.
func TestAnObjectWithoutAFolder(t *testing.T) {
	r, other := start(t, WithMulticast(1)), start(t, WithMulticast(1))
	prop := teamOf(1, chunk)
	prop.HandleTypes = uint64(driver.HandlePosixFD)
	h, res := r.MulticastCreate(prop)
	r.ok(res)
	r.ok(r.MulticastAddDevice(h, 0))
	f := r.export(h)
	i, res := r.importFD(f)
	r.ok(res)
	plain, shared := r.create(chunk, on(0, 0)), r.create(chunk, on(0, driver.HandlePosixFD))
	r.is(driver.InvalidValue, r.MulticastBindMemV1(i, 0, plain, 0, chunk))
	r.ok(r.MulticastBindMemV1(i, 0, shared, 0, chunk))
	r.ok(r.MulticastUnbind(h, 0, 0, chunk))
	_, res = other.importFD(f)
	other.is(driver.Unknown, res)
	for _, h := range []driver.MemHandle{h, i, plain, shared} {
		r.ok(r.MemRelease(h))
	}
	require.Empty(t, r.m.teams)
}

// Teams of all sizes, one process each, of which one is killed at some step.
// Whatever the others were told then, and whether they block, nothing is left
// when they are gone, and the next team forms.
func TestATeamIsKilledAtAnyStep(t *testing.T) {
	steps := []string{"add", "bind", "map", "set", "sum", "barrier", "unbind", "leave", "free"}
	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))
	for range 10 {
		size, last := 1+rng.IntN(4), rng.IntN(len(steps))
		c := startCrew(t, size, rng.IntN(2) == 0)
		for _, do := range steps[:last] {
			if do == "sum" {
				c.tell(0, step{Do: do})
			} else {
				c.all(step{Do: do, Value: uint32(size)})
			}
		}
		victim := rng.IntN(size)
		for i, m := range c.members {
			if i == victim {
				time.Sleep(time.Duration(rng.IntN(500)) * time.Microsecond)
				m.Kill()
			} else {
				m.Send(step{Do: steps[last], Value: uint32(size)})
			}
		}
		for _, m := range c.members {
			m.Kill() // also one that blocks, or waits for an arrival
		}
		c.nothingLeft()
	}
}

func TestClosingASharedMachineEndsABlockedBind(t *testing.T) {
	folder := t.TempDir()
	m, err := New(teamIn(folder, 2))
	require.NoError(t, err)
	d := driver.Of(m)
	require.Zero(t, d.Init())
	prop := teamOf(2, chunk)
	prop.HandleTypes = uint64(driver.HandlePosixFD)
	h, res := d.MulticastCreate(prop)
	require.Zero(t, res)
	memory, res := d.MemCreate(chunk, on(0, driver.HandlePosixFD))
	require.Zero(t, res)
	result := make(chan driver.Result)
	go func() { result <- d.MulticastBindMemV1(h, 0, memory, 0, chunk) }()
	time.Sleep(5 * time.Millisecond)
	require.Zero(t, d.MemRelease(h)) // the call alone holds both now
	require.Zero(t, d.MemRelease(memory))
	require.NoError(t, m.Close())
	require.Equal(t, driver.Deinitialized, <-result)
	require.Zero(t, taken(t, folder))
	noFiles(t, folder)
}

// An object lives as long as a descriptor of it, and remembers.
func TestAnObjectInADescriptorLives(t *testing.T) {
	c := startCrew(t, 2, false)
	c.all(step{Do: "add"})
	for _, m := range c.members {
		m.Kill()
	}
	u, err := Inspect(c.folder)
	require.NoError(t, err)
	require.Equal(t, []ExportedMemory{{Device: -1, Open: true}}, u.Exported)
	r := start(t, teamIn(c.folder, 2))
	h, res := r.importFD(c.object)
	r.ok(res)
	r.is(driver.InvalidValue, r.MulticastAddDevice(h, 0)) // it was added
	p := r.reserve(chunk)
	r.ok(r.MemMap(p, chunk, 0, h)) // does not block
	r.ok(r.MemUnmap(p, chunk))
	r.ok(r.MemAddressFree(p, chunk))
	r.ok(r.MemRelease(h))
	c.nothingLeft()
}
