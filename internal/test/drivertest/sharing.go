package drivertest

import (
	"os"
	"strings"
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
)

// sharing are the rules of memory that two handles or two processes hold.
var sharing = []Case{
	{
		Name: "export to a descriptor of a handle that was created without the descriptor type",
		Says: "INVALID_VALUE",
		Run: func(t *T) {
			_, r := t.D.MemExportToShareableHandle(t.create(t.chunk), driver.HandlePosixFD)
			t.returns(driver.InvalidValue, r, "export")
		},
	},
	{
		Name:  "an exported descriptor",
		Says:  "a fresh one each call, close-on-exec set; on the real driver a link to the NVIDIA control device, which says nothing about the size",
		Needs: needs(shareableByFD),
		Run: func(t *T) {
			h := t.create(t.chunk, shared(onDevice(t.Device), driver.HandlePosixFD))
			first, second := t.export(h), t.export(h)
			if first == second {
				t.Errorf("both exports give descriptor %d", first)
			}
			for _, fd := range []int{first, second} {
				if closed, err := closedOnExec(fd); err != nil || !closed {
					t.Errorf("descriptor %d: close-on-exec is %v, error %v", fd, closed, err)
				}
				if t.software {
					continue
				}
				if link, err := os.Readlink(descriptorPath(fd)); err != nil || !strings.Contains(link, "nvidia") {
					t.Errorf("descriptor %d is a link to %q, error %v, want an NVIDIA device", fd, link, err)
				}
				if size, err := sizeOf(fd); err != nil || size != 0 {
					t.Errorf("descriptor %d: size %d, error %v, want 0", fd, size, err)
				}
			}
		},
	},
	{
		Name:  "an exported descriptor that is still open",
		Says:  "pins the memory until it is closed",
		Needs: needs(shareableByFD),
		Run: func(t *T) {
			size := roundUp(64<<20, t.chunk)
			before := t.free(t.device)
			p, h := t.memory(size, shared(onDevice(t.Device), driver.HandlePosixFD))
			fd := t.export(h)
			t.unmap(p)
			t.release(h)
			pinned := t.free(t.device)
			if pinned+size > before {
				t.Errorf("of %d free bytes %d are left while the descriptor of %d is open", before, pinned, size)
			}
			t.close(fd)
			if now := t.free(t.device); now < pinned+size {
				t.Errorf("%d bytes are free after closing it, %d before, want %d more", now, pinned, size)
			}
		},
	},
	{
		Name:  "import of a descriptor that is no CUDA memory, such as the null device's, or of -1",
		Says:  "UNKNOWN",
		Needs: needs(shareableByFD),
		Run: func(t *T) {
			null, err := os.Open(os.DevNull)
			if err != nil {
				t.Fatal(err)
			}
			defer null.Close()
			for _, fd := range []int{int(null.Fd()), -1} {
				_, r := t.D.MemImportFromShareableHandle(fromFD(fd), driver.HandlePosixFD)
				t.returns(driver.Unknown, r, "import of descriptor %d", fd)
			}
		},
	},
	{
		Name:  "import of the same descriptor twice",
		Says:  "two handles, both valid",
		Needs: needs(shareableByFD),
		Run: func(t *T) {
			p, h := t.memory(t.chunk, shared(onDevice(t.Device), driver.HandlePosixFD))
			fd := t.export(h)
			first, second := t.importFD(fd), t.importFD(fd)
			at := t.reserve(2 * t.chunk)
			t.bind(at, t.chunk, first)
			t.bind(at+driver.Ptr(t.chunk), t.chunk, second)
			t.allow(at, 2*t.chunk)
			t.close(fd)
			t.fill(t.device, p, t.chunk, 0x71)
			t.reads(t.device, at, 2*t.chunk, 0x71)

			// Each is a reference of its own: one end leaves the other.
			t.unmap(at)
			t.release(first)
			t.unmap(p)
			t.release(h)
			t.reads(t.device, at+driver.Ptr(t.chunk), t.chunk, 0x71)
			_, r := t.D.MemGetAllocationPropertiesFromHandle(second)
			t.ok(r, "properties of the second import")
		},
	},
	{
		Name:  "import in another process on the same device",
		Says:  "success: map, access, read and write work, and both sides see the bytes",
		Needs: needs(shareableByFD),
		Run:   func(t *T) { t.shareWithChild(0) },
	},
	{
		Name:  "import in another process on another device",
		Says:  "success: map, access, read and write work, and both sides see the bytes",
		Needs: needs(shareableByFD, twoDevices),
		Run:   func(t *T) { t.shareWithChild(1) },
	},
	{
		Name:  "the creator's process is killed after another has imported",
		Says:  "the memory stays with the importer, with its contents",
		Needs: needs(shareableByFD),
		Run:   func(t *T) { t.outlive() },
	},
	{
		Name:  "a descriptor in a process that never loaded the driver, after the creator's process was killed",
		Says:  "pins the memory, with its contents: whoever receives the descriptor imports it",
		Needs: needs(shareableByFD),
		Run:   func(t *T) { t.keptWithoutDriver() },
	},
	{
		Name:  "create and export in a process that has called cuInit alone",
		Says:  "success, without a context: the device's primary context stays inactive, no memory is taken for one, and another process that imports the memory maps, writes and reads it",
		Needs: needs(shareableByFD),
		Run:   func(t *T) { t.madeWithoutContext() },
	},
	{
		Name:  "memory that a process without a context made, written by one that imported it and was then killed",
		Says:  "keeps the bytes for whoever imports the descriptor next",
		Needs: needs(shareableByFD),
		Run:   func(t *T) { t.writtenByAnImporter() },
	},
	{
		Name:  "import of a descriptor whose memory was unmapped and released, the context that wrote it destroyed",
		Says:  "success: the memory has its bytes",
		Needs: needs(shareableByFD),
		Run: func(t *T) {
			c := t.newContext()
			writer := device{t.Device, c, t.newStream(c, driver.StreamNonBlocking), 0, 0}
			p, h := t.memory(t.chunk, shared(onDevice(t.Device), driver.HandlePosixFD))
			t.fill(writer, p, t.chunk, 0x72)
			fd := t.export(h)
			t.unmap(p)
			t.release(h)
			t.end("stream", uint64(writer.stream))
			t.end("context", uint64(c))
			t.reads(t.device, t.open(t.importFD(fd), t.chunk), t.chunk, 0x72)
		},
	},
	{
		Name:  "properties of an imported handle",
		Says:  "type and location are there; requested handle types reads 0",
		Needs: needs(shareableByFD),
		Run: func(t *T) {
			h := t.create(t.chunk, shared(onDevice(t.Device), driver.HandlePosixFD))
			got, r := t.D.MemGetAllocationPropertiesFromHandle(t.importFD(t.export(h)))
			t.ok(r, "properties")
			if got.Type != driver.AllocationPinned || got.Location != deviceLocation(t.Device) || got.RequestedHandleTypes != 0 {
				t.Errorf("properties read %+v", got)
			}
		},
	},
	{
		Name:  "properties of an imported handle of memory that is RDMA-capable",
		Says:  "RDMA reads 0, although the creator's handle says that it was granted",
		Needs: needs(shareableByFD, rdmaMemory),
		Run: func(t *T) {
			p := shared(onDevice(t.Device), driver.HandlePosixFD)
			p.Flags.GPUDirectRDMACapable = 1
			h := t.create(t.chunk, p)
			mine, r := t.D.MemGetAllocationPropertiesFromHandle(h)
			t.ok(r, "properties of the creator's")
			got, r := t.D.MemGetAllocationPropertiesFromHandle(t.importFD(t.export(h)))
			t.ok(r, "properties of the imported one")
			if mine.Flags.GPUDirectRDMACapable != 1 || got.Flags.GPUDirectRDMACapable != 0 {
				t.Errorf("RDMA reads %d for the creator, %d for the importer", mine.Flags.GPUDirectRDMACapable, got.Flags.GPUDirectRDMACapable)
			}
		},
	},
	{
		Name:  "properties of an imported handle of compressible memory",
		Says:  "compression reads as it was granted",
		Needs: needs(shareableByFD, compressible),
		Run: func(t *T) {
			p := shared(onDevice(t.Device), driver.HandlePosixFD)
			p.Flags.CompressionType = driver.CompressionGeneric
			h := t.create(t.chunk, p)
			mine, r := t.D.MemGetAllocationPropertiesFromHandle(h)
			t.ok(r, "properties of the creator's")
			got, r := t.D.MemGetAllocationPropertiesFromHandle(t.importFD(t.export(h)))
			t.ok(r, "properties of the imported one")
			if got.Flags.CompressionType != mine.Flags.CompressionType {
				t.Errorf("compression reads %d for the creator, %d for the importer", mine.Flags.CompressionType, got.Flags.CompressionType)
			}
		},
	},
	{
		Name:  "re-export of an imported handle",
		Says:  "INVALID_VALUE: only the creator exports. The descriptor itself can be forwarded",
		Needs: needs(shareableByFD),
		Run: func(t *T) {
			h := t.create(t.chunk, shared(onDevice(t.Device), driver.HandlePosixFD))
			fd := t.export(h)
			_, r := t.D.MemExportToShareableHandle(t.importFD(fd), driver.HandlePosixFD)
			t.returns(driver.InvalidValue, r, "re-export")
			forwarded, err := duplicate(fd)
			if err != nil {
				t.Fatal(err)
			}
			t.ownDescriptor(forwarded)
			t.close(fd)
			t.importFD(forwarded)
		},
	},
	{
		Name:  "mapping an imported handle with a size that is not its own",
		Says:  "NOT_SUPPORTED: the size must travel beside the descriptor",
		Needs: needs(shareableByFD),
		Run: func(t *T) {
			h := t.create(2*t.chunk, shared(onDevice(t.Device), driver.HandlePosixFD))
			i := t.importFD(t.export(h))
			p := t.reserve(4 * t.chunk)
			t.returns(driver.NotSupported, t.D.MemMap(p, t.chunk, 0, i), "map half of it")
			t.returns(driver.NotSupported, t.D.MemMap(p, 4*t.chunk, 0, i), "map twice its size")
			t.bind(p, 2*t.chunk, i)
		},
	},
	{
		Name:  "import of a fabric handle while the process has no open IMEX channel",
		Says:  "NOT_SUPPORTED",
		Needs: needs(fabricHandles, noFabricChannel),
		Run: func(t *T) {
			_, r := t.D.MemImportFromShareableHandle(driver.ShareableHandle{1}, driver.HandleFabric)
			t.returns(driver.NotSupported, r, "import")
		},
	},
	{
		Name:  "‡ import of 64 bytes that are no fabric handle, with an open IMEX channel",
		Says:  "INVALID_HANDLE",
		Needs: needs(fabricHandles, fabricChannel),
		Run: func(t *T) {
			_, r := t.D.MemImportFromShareableHandle(driver.ShareableHandle{1}, driver.HandleFabric)
			t.returns(driver.InvalidHandle, r, "import")
		},
	},
	{
		Name:  "‡ import of a fabric handle in another process on the same channel",
		Says:  "success: map, access, read and write work, and both sides see the bytes",
		Needs: needs(fabricHandles, fabricChannel),
		Run:   func(t *T) { t.shareByFabric(driver.HandleFabric) },
	},
	{
		Name:  "‡ the same, of memory that has descriptors too",
		Says:  "success; and a descriptor of it can be made and imported as well",
		Needs: needs(fabricHandles, fabricChannel, shareableByFD),
		Run: func(t *T) {
			t.importFD(t.export(t.shareByFabric(driver.HandleFabric | driver.HandlePosixFD)))
		},
	},
	{
		Name:  "‡ a fabric handle of memory that was released",
		Says:  "INVALID_HANDLE: it pins nothing, and the memory is free",
		Needs: needs(fabricHandles, fabricChannel),
		Run: func(t *T) {
			before := t.free(t.device)
			h := t.create(t.chunk, shared(onDevice(t.Device), driver.HandleFabric))
			s, r := t.D.MemExportToShareableHandle(h, driver.HandleFabric)
			t.ok(r, "export")
			t.release(h)
			if now := t.free(t.device); t.software && now != before {
				t.Errorf("%d bytes are free, %d were before", now, before)
			}
			_, r = t.D.MemImportFromShareableHandle(s, driver.HandleFabric)
			t.returns(driver.InvalidHandle, r, "import")
		},
	},
	{
		Name:  "a DMA-BUF descriptor of a mapped range",
		Says:  "success",
		Needs: needs(dmaBuf, entryPoints(driver.CallMemGetHandleForAddressRange)),
		Run: func(t *T) {
			p, _ := t.memory(t.chunk)
			fd, r := t.D.MemGetHandleForAddressRange(t.ctx, p, t.chunk, 0)
			t.ok(r, "DMA-BUF descriptor")
			if err := closeDescriptor(int(fd)); err != nil {
				t.Errorf("close of descriptor %d: %v", fd, err)
			}
		},
	},
}

// outlive imports what a child made, kills the child, and uses the memory.
func (t *T) outlive() {
	near, far := t.socketPair()
	size := roundUp(64<<20, t.chunk)
	c := t.child("create and export")
	c.ExtraFiles = []*os.File{far}
	c.Start()
	c.Send(guest{Size: size, Writes: 0x33})
	var sent bool
	c.Recv(&sent)
	fd, err := receiveDescriptor(near)
	if err != nil {
		t.Fatal(err)
	}
	h := t.importFD(fd)
	if err := closeDescriptor(fd); err != nil {
		t.Fatal(err)
	}
	c.Kill()
	p := t.open(h, size)
	t.reads(t.device, p, size, 0x33)
	t.works(t.device, p, size)
}

// keptWithoutDriver has a child make memory and another, which has no driver, keep the
// descriptor. The first is killed before the descriptor comes here.
func (t *T) keptWithoutDriver() {
	made, kept := t.socketPair()
	handed, received := t.socketPair()
	size := roundUp(64<<20, t.chunk)
	creator := t.child("create and export")
	creator.ExtraFiles = []*os.File{made}
	creator.Start()
	creator.Send(guest{Size: size, Writes: 0x44})
	var sent bool
	creator.Recv(&sent)

	keeper := reexec.Command(t, keepsDescriptor)
	keeper.ExtraFiles = []*os.File{kept, handed}
	keeper.Start()
	keeper.Recv(&sent)
	creator.Kill()
	keeper.Send(true)
	fd, err := receiveDescriptor(received)
	if err != nil {
		t.Fatal(err)
	}
	t.ownDescriptor(fd)
	keeper.Wait()
	h := t.importFD(fd)
	t.close(fd)
	p := t.open(h, size)
	t.reads(t.device, p, size, 0x44)
	t.works(t.device, p, size)
}

// madeWithoutContext imports what a child made that has no context.
func (t *T) madeWithoutContext() {
	here, there := t.socketPair()
	size := roundUp(64<<20, t.chunk)
	free := t.free(t.device)
	c := t.child("create without a context")
	c.ExtraFiles = []*os.File{there}
	c.Start()
	c.Send(guest{Size: size})
	var active bool
	c.Recv(&active)
	if active {
		t.Errorf("the primary context is active")
	}
	allowed := size
	if !t.software {
		allowed += slack
	}
	if now := t.free(t.device); now+allowed < free {
		t.Errorf("%d bytes are free, %d were before another process made %d", now, free, size)
	}
	fd, err := receiveDescriptor(here)
	if err != nil {
		t.Fatal(err)
	}
	t.ownDescriptor(fd)
	t.works(t.device, t.open(t.importFD(fd), size), size)
	c.Wait()
}

// writtenByAnImporter reads what a child wrote to another's memory, when both are gone.
func (t *T) writtenByAnImporter() {
	here, there := t.socketPair()
	size := 2 * t.chunk
	maker := t.child("create without a context")
	maker.ExtraFiles = []*os.File{there}
	maker.Start()
	maker.Send(guest{Size: size})
	var active bool
	maker.Recv(&active)
	fd, err := receiveDescriptor(here)
	if err != nil {
		t.Fatal(err)
	}
	t.ownDescriptor(fd)
	maker.Wait()
	writer := t.importer(fd)
	writer.Start()
	writer.Send(guest{Size: size, Writes: 0x23, Stays: true})
	var written bool
	writer.Recv(&written)
	writer.Kill()
	t.reads(t.device, t.open(t.importFD(fd), size), size, 0x23)
}

// importer prepares a child that imports what a descriptor stands for.
func (t *T) importer(fd int) *reexec.Cmd {
	t.Helper()
	inherited, err := duplicate(fd)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(inherited), "shared memory")
	t.Cleanup(func() { file.Close() })
	c := t.child("import")
	c.ExtraFiles = []*os.File{file}
	return c
}

// open maps memory at an address of its own, which the device may use.
func (t *T) open(h driver.MemHandle, size uint64) driver.Ptr {
	t.Helper()
	p := t.reserve(size)
	t.bind(p, size, h)
	t.allow(p, size)
	return p
}

func (t *T) socketPair() (a, b *os.File) {
	t.Helper()
	a, b, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = a.Close()
		_ = b.Close()
	})
	return a, b
}

// guest is the message to a child that imports memory.
type guest struct {
	// Device is the ordinal of the device that it works on.
	Device int32
	Size   uint64
	// Reads is the byte that it must find everywhere, Writes the one that it
	// leaves there.
	Reads, Writes byte
	// Fabric is the handle by which it imports, if it was given no descriptor.
	Fabric driver.ShareableHandle
	// Stays says that it holds the memory until it is killed.
	Stays bool
}

// shareByFabric has a child import memory of the given handle types.
func (t *T) shareByFabric(types driver.HandleTypes) driver.MemHandle {
	size := 2 * t.chunk
	p, h := t.memory(size, shared(onDevice(t.Device), types))
	s, r := t.D.MemExportToShareableHandle(h, driver.HandleFabric)
	t.ok(r, "export")
	t.fill(t.device, p, size, 0x11)
	c := t.child("import")
	c.Start()
	c.Send(guest{Size: size, Reads: 0x11, Writes: 0x22, Fabric: s})
	var written bool
	c.Recv(&written)
	t.reads(t.device, p, size, 0x22)
	c.Wait()
	return h
}

func (t *T) shareWithChild(ordinal int32) {
	size := 2 * t.chunk
	p, h := t.memory(size, shared(onDevice(t.Device), driver.HandlePosixFD))
	fd := t.export(h)
	t.fill(t.device, p, size, 0x11)
	c := t.importer(fd)
	c.Start()
	c.Send(guest{Device: ordinal, Size: size, Reads: 0x11, Writes: 0x22})
	var written bool
	c.Recv(&written)
	t.reads(t.device, p, size, 0x22)
	c.Wait()
	t.reads(t.device, p, size, 0x22)
}

// mapped maps a handle of the child's own, open to a device.
func (c *child) mapped(h driver.MemHandle, size uint64, dev driver.Device) driver.Ptr {
	c.later("release", func() driver.Result { return c.d.MemRelease(h) })
	p, r := c.d.MemAddressReserve(size, 0, 0)
	c.ok(r, "reserve")
	c.later("address free", func() driver.Result { return c.d.MemAddressFree(p, size) })
	c.ok(c.d.MemMap(p, size, 0, h), "map")
	c.later("unmap", func() driver.Result { return c.d.MemUnmap(p, size) })
	c.ok(c.d.MemSetAccess(p, size, grant(driver.AccessReadWrite, deviceLocation(dev))), "set access")
	return p
}

func (c *child) stream(ctx driver.Context) driver.Stream {
	s, r := c.d.StreamCreate(ctx, driver.StreamNonBlocking)
	c.ok(r, "create a stream")
	c.later("destroy the stream", func() driver.Result { return c.d.StreamDestroy(ctx, s) })
	return s
}

// keepsDescriptor is a process that passes a descriptor on when it is told to.
const keepsDescriptor = "a process without the driver"

func init() {
	reexec.Register(keepsDescriptor, func(c *reexec.Child) error {
		fd, err := receiveDescriptor(c.Files[0])
		if err != nil {
			return err
		}
		if err := c.Send(true); err != nil {
			return err
		}
		var goOn bool
		if err := c.Recv(&goOn); err != nil {
			return err
		}
		return sendDescriptor(c.Files[1], fd)
	})
	roles["create and export"] = func(c *child) {
		var g guest
		c.recv(&g)
		dev, ctx := c.device(g.Device)
		h, r := c.d.MemCreate(g.Size, shared(onDevice(dev), driver.HandlePosixFD))
		c.ok(r, "create")
		p := c.mapped(h, g.Size, dev)
		s := c.stream(ctx)
		c.ok(c.d.MemsetD8Async(ctx, p, g.Writes, g.Size, s), "write")
		c.ok(c.d.StreamSynchronize(ctx, s), "write")
		fd, r := c.d.MemExportToShareableHandle(h, driver.HandlePosixFD)
		c.ok(r, "export")
		c.check(sendDescriptor(c.Files[0], toFD(fd)))
		c.send(true)
		// The test kills this process, in the middle of its work.
		var never bool
		c.recv(&never)
	}
	roles["create without a context"] = func(c *child) {
		var g guest
		c.recv(&g)
		dev, r := c.d.DeviceGet(g.Device)
		c.ok(r, "cuDeviceGet")
		h, r := c.d.MemCreate(g.Size, shared(onDevice(dev), driver.HandlePosixFD))
		c.ok(r, "create")
		c.later("release", func() driver.Result { return c.d.MemRelease(h) })
		fd, r := c.d.MemExportToShareableHandle(h, driver.HandlePosixFD)
		c.ok(r, "export")
		_, active, r := c.d.DevicePrimaryCtxGetState(dev)
		c.ok(r, "cuDevicePrimaryCtxGetState")
		c.send(active)
		c.check(sendDescriptor(c.Files[0], toFD(fd)))
	}
	roles["import"] = func(c *child) {
		var g guest
		c.recv(&g)
		dev, ctx := c.device(g.Device)
		handle, form := g.Fabric, driver.HandleFabric
		if len(c.Files) > 0 {
			handle, form = fromFD(int(c.Files[0].Fd())), driver.HandlePosixFD
		}
		h, r := c.d.MemImportFromShareableHandle(handle, form)
		c.ok(r, "import")
		p := c.mapped(h, g.Size, dev)
		s := c.stream(ctx)
		host, r := c.d.MemHostAlloc(ctx, g.Size, driver.HostAllocPortable)
		c.ok(r, "host alloc")
		c.later("host free", func() driver.Result { return c.d.MemFreeHost(ctx, host) })
		c.ok(c.d.MemcpyDtoHAsync(ctx, host, p, g.Size, s), "read")
		c.ok(c.d.StreamSynchronize(ctx, s), "read")
		for _, b := range unsafe.Slice((*byte)(host), g.Size) {
			if b != g.Reads {
				c.check(errContents)
			}
		}
		c.ok(c.d.MemsetD8Async(ctx, p, g.Writes, g.Size, s), "write")
		c.ok(c.d.StreamSynchronize(ctx, s), "write")
		c.send(true)
		if g.Stays {
			var never bool
			c.recv(&never)
		}
	}
}
