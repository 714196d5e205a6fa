package drivertest

import (
	"math/bits"
	"os"
	"time"

	"github.com/cuvmm/cuvmm/internal/driver"
)

var (
	multicastDevice = attribute("multicast", driver.AttrMulticast)
	multicastCalls  = entryPoints(driver.CallMulticastCreate)
	// multicastObjects are never made on a real driver: what goes wrong with one
	// can disturb the fabric of the whole machine.
	multicastObjects = needs(softwareDriver, multicastDevice, multicastCalls)
)

// multicasts are the rules of multicast objects.
var multicasts = []Case{
	{
		Name:  "granularity of a multicast object, minimum and recommended, of 0 bytes or more",
		Says:  "powers of two, the recommended a multiple of the minimum; nothing is created",
		Needs: needs(multicastDevice, multicastCalls),
		Run: func(t *T) {
			for _, size := range []uint64{0, 1 << 30} {
				p := driver.MulticastProp{NumDevices: uint32(len(t.devices)), Size: size}
				least, r := t.D.MulticastGetGranularity(p, driver.GranularityMinimum)
				t.ok(r, "minimum for %d bytes", size)
				best, r := t.D.MulticastGetGranularity(p, driver.GranularityRecommended)
				t.ok(r, "recommended for %d bytes", size)
				if bits.OnesCount64(least) != 1 || bits.OnesCount64(best) != 1 || best < least {
					t.Errorf("for %d bytes the driver returns %d and %d", size, least, best)
				}
			}
		},
	},
	{
		Name:  "‡ cuMulticastCreate for no devices, of 0 bytes, of a size that is not a multiple of the granularity, or with flags",
		Says:  "INVALID_VALUE",
		Needs: multicastObjects,
		Run: func(t *T) {
			for _, p := range []driver.MulticastProp{
				{Size: t.unit()}, {NumDevices: 1}, {NumDevices: 1, Size: t.unit() / 2}, {NumDevices: 1, Size: t.unit(), Flags: 1},
			} {
				_, r := t.D.MulticastCreate(p)
				t.returns(driver.InvalidValue, r, "create %+v", p)
			}
		},
	},
	{
		Name:  "‡ cuMulticastAddDevice of a device twice, or of one more than the object is for",
		Says:  "INVALID_VALUE",
		Needs: multicastObjects,
		Run: func(t *T) {
			mc := t.multicast(2)
			t.ok(t.D.MulticastAddDevice(mc, t.Device), "add")
			t.returns(driver.InvalidValue, t.D.MulticastAddDevice(mc, t.Device), "add again")
			full := t.multicast(1)
			t.ok(t.D.MulticastAddDevice(full, t.Device), "add")
			if len(t.devices) > 1 {
				t.returns(driver.InvalidValue, t.D.MulticastAddDevice(full, t.devices[1].Device), "add a second")
			}
		},
	},
	{
		Name:  "‡ cuMulticastBindMem at an offset or of a size that is not a multiple of the granularity, past either end, or over another bind",
		Says:  "INVALID_VALUE",
		Needs: multicastObjects,
		Run: func(t *T) {
			mc := t.multicast(1)
			t.ok(t.D.MulticastAddDevice(mc, t.Device), "add")
			u := t.unit()
			h := t.create(2 * u)
			for _, b := range []struct{ mcOffset, offset, size uint64 }{
				{0, 0, 0}, {0, 0, u / 2}, {u / 2, 0, u}, {0, u / 2, u}, {u, 0, 2 * u}, {0, u, 2 * u},
			} {
				t.returns(driver.InvalidValue, t.D.MulticastBindMemV1(mc, b.mcOffset, h, b.offset, b.size), "bind %+v", b)
			}
			t.ok(t.D.MulticastBindMemV1(mc, 0, h, 0, 2*u), "bind")
			t.returns(driver.InvalidValue, t.D.MulticastBindMemV1(mc, u, t.create(u), 0, u), "bind over it")
			t.ok(t.D.MulticastUnbind(mc, t.Device, 0, 2*u), "unbind")
		},
	},
	{
		Name:  "‡ memory that cannot be exported, bound to a multicast object that can",
		Says:  "INVALID_VALUE",
		Needs: append(multicastObjects[:3:3], shareableByFD),
		Run: func(t *T) {
			mc := t.multicast(1, driver.HandlePosixFD)
			t.ok(t.D.MulticastAddDevice(mc, t.Device), "add")
			t.returns(driver.InvalidValue, t.D.MulticastBindMemV1(mc, 0, t.create(t.unit()), 0, t.unit()), "bind")
			h := t.create(t.unit(), shared(onDevice(t.Device), driver.HandlePosixFD))
			t.ok(t.D.MulticastBindMemV1(mc, 0, h, 0, t.unit()), "bind what can")
			t.ok(t.D.MulticastUnbind(mc, t.Device, 0, t.unit()), "unbind")
		},
	},
	{
		Name:  "‡ bind and map of a multicast object before all of its devices were added",
		Says:  "block until they are",
		Needs: append(multicastObjects[:3:3], twoDevices),
		Run: func(t *T) {
			mc := t.multicast(2)
			t.ok(t.D.MulticastAddDevice(mc, t.Device), "add")
			h, p := t.create(t.unit()), t.reserve(2*t.unit())
			results := make(chan driver.Result, 2)
			go func() { results <- t.D.MulticastBindMemV1(mc, 0, h, 0, t.unit()) }()
			go func() { results <- t.D.MemMap(p, 2*t.unit(), 0, mc) }()
			time.Sleep(t.glance())
			if len(results) > 0 {
				t.Errorf("one of them did not wait: %v", <-results)
			}
			t.ok(t.D.MulticastAddDevice(mc, t.devices[1].Device), "add the last")
			t.ok(<-results, "bind or map")
			t.ok(<-results, "bind or map")
			t.ok(t.D.MemUnmap(p, 2*t.unit()), "unmap")
			t.ok(t.D.MulticastUnbind(mc, t.Device, 0, t.unit()), "unbind")
		},
	},
	{
		Name:  "‡ cuMulticastUnbind with another offset or size than the bind's",
		Says:  "undefined; the software driver returns INVALID_VALUE",
		Needs: multicastObjects,
		Run: func(t *T) {
			mc := t.multicast(1)
			t.ok(t.D.MulticastAddDevice(mc, t.Device), "add")
			u := t.unit()
			t.ok(t.D.MulticastBindMemV1(mc, 0, t.create(2*u), 0, 2*u), "bind")
			t.returns(driver.InvalidValue, t.D.MulticastUnbind(mc, t.Device, 0, u), "unbind half")
			t.returns(driver.InvalidValue, t.D.MulticastUnbind(mc, t.Device, u, u), "unbind the other half")
			t.ok(t.D.MulticastUnbind(mc, t.Device, 0, 2*u), "unbind")
		},
	},
	{
		Name:  "†‡ a memset at a multicast address",
		Says:  "undefined; on the software driver it fails, and its context is lost",
		Needs: multicastObjects,
		Run: func(t *T) {
			var found lostContext
			c := t.child("memset at a multicast address")
			c.Start()
			c.Recv(&found)
			c.Wait()
			found.check(t)
		},
	},
	{
		Name:  "‡ a multicast object that is imported in another process",
		Says:  "is the same: devices that one adds count for both, and each binds and maps",
		Needs: append(multicastObjects[:3:3], fabricChannel, shareableByFD),
		Run: func(t *T) {
			mc := t.multicast(1, driver.HandlePosixFD)
			file, err := duplicate(t.export(mc))
			if err != nil {
				t.Fatal(err)
			}
			object := os.NewFile(uintptr(file), "multicast object")
			defer object.Close()
			c := t.child("take part in a multicast object")
			c.ExtraFiles = []*os.File{object}
			c.Start()
			var ready bool
			c.Recv(&ready)
			t.returns(driver.InvalidValue, t.D.MulticastAddDevice(mc, t.Device), "add what the other process added")
			p := t.reserve(2 * t.unit())
			t.bind(p, 2*t.unit(), mc)
			c.Wait()
		},
	},
}

// unit is the granularity of multicast objects, in bytes.
func (t *T) unit() uint64 {
	t.Helper()
	n, r := t.D.MulticastGetGranularity(driver.MulticastProp{NumDevices: 1}, driver.GranularityMinimum)
	t.ok(r, "granularity")
	return n
}

// multicast makes an object of two units for so many devices.
func (t *T) multicast(devices uint32, types ...driver.HandleTypes) driver.MemHandle {
	t.Helper()
	p := driver.MulticastProp{NumDevices: devices, Size: 2 * t.unit()}
	for _, h := range types {
		p.HandleTypes |= uint64(h)
	}
	mc, r := t.D.MulticastCreate(p)
	t.ok(r, "create a multicast object")
	t.ownHandle(mc)
	return mc
}

func init() {
	roles["memset at a multicast address"] = func(c *child) {
		dev, ctx := c.device(0)
		c.undo = nil // a lost context is given back by the process's end
		unit, r := c.d.MulticastGetGranularity(driver.MulticastProp{NumDevices: 1}, driver.GranularityMinimum)
		c.ok(r, "granularity")
		s, r := c.d.StreamCreate(ctx, driver.StreamNonBlocking)
		c.ok(r, "create a stream")
		mc, r := c.d.MulticastCreate(driver.MulticastProp{NumDevices: 1, Size: unit})
		c.ok(r, "create")
		c.ok(c.d.MulticastAddDevice(mc, dev), "add")
		p, r := c.d.MemAddressReserve(unit, 0, 0)
		c.ok(r, "reserve")
		c.ok(c.d.MemMap(p, unit, 0, mc), "map")
		c.ok(c.d.MemSetAccess(p, unit, grant(driver.AccessReadWrite, deviceLocation(dev))), "set access")
		c.send(c.watchLoss(ctx, s, c.d.MemsetD8Async(ctx, p, 1, unit, s)))
	}
	roles["take part in a multicast object"] = func(c *child) {
		dev, _ := c.device(0)
		mc, r := c.d.MemImportFromShareableHandle(fromFD(int(c.Files[0].Fd())), driver.HandlePosixFD)
		c.ok(r, "import")
		c.later("release", func() driver.Result { return c.d.MemRelease(mc) })
		c.ok(c.d.MulticastAddDevice(mc, dev), "add")
		unit, r := c.d.MulticastGetGranularity(driver.MulticastProp{NumDevices: 1}, driver.GranularityMinimum)
		c.ok(r, "granularity")
		h, r := c.d.MemCreate(unit, shared(onDevice(dev), driver.HandlePosixFD))
		c.ok(r, "create")
		c.later("release", func() driver.Result { return c.d.MemRelease(h) })
		c.ok(c.d.MulticastBindMemV1(mc, unit, h, 0, unit), "bind")
		c.later("unbind", func() driver.Result { return c.d.MulticastUnbind(mc, dev, unit, unit) })
		c.send(true)
	}
}
