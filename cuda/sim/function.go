package sim

import (
	"fmt"
	"regexp"
	"strconv"

	"github.com/cuvmm/cuvmm/internal/driver"
)

// Limits of a multiprocessor of the device on which the driver was measured.
const (
	residentThreads = 2048
	residentBlocks  = 32
	residentShared  = 228 << 10
	reservedShared  = 1 << 10 // of each block, for the driver
)

var ptxShared = regexp.MustCompile(`\.shared\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)\s+[A-Za-z0-9_$%]+\s*(?:\[\s*(\d+)\s*\])?\s*;`)

// sharedOf returns the static shared memory that an entry declares.
func sharedOf(body string) (total uint64, err error) {
	for _, found := range ptxShared.FindAllStringSubmatch(body, -1) {
		n, err := sizeOf(found[1], found[2])
		if err != nil {
			return 0, err
		}
		total += n
	}
	return total, nil
}

// sizeOf returns the bytes of a variable of so many bits, or of an array of them.
func sizeOf(bits, count string) (uint64, error) {
	width, err := strconv.ParseUint(bits, 10, 16)
	if err != nil || width == 0 || width%8 != 0 {
		return 0, fmt.Errorf("%s bits are no whole bytes", bits)
	}
	if count == "" {
		return width / 8, nil
	}
	n, err := strconv.ParseUint(count, 10, 32)
	return n * width / 8, err
}

// blocksAtOnce returns how many blocks a multiprocessor runs at once.
func (f *function) blocksAtOnce(threads, dynamic uint64) uint64 {
	if threads == 0 || threads > maxBlockThreads {
		return 0
	}
	return min(residentThreads/threads, residentBlocks, residentShared/(f.entry.shared+dynamic+reservedShared))
}

// atOnce returns how many blocks of a launch the device runs at once.
func (f *function) atOnce(l driver.LaunchConfig) uint64 {
	threads := uint64(l.BlockX) * uint64(l.BlockY) * uint64(l.BlockZ)
	return f.blocksAtOnce(threads, uint64(l.SharedBytes)) * uint64(f.module.context.device.attributes[driver.AttrMultiprocessorCount])
}

// enterFunction enters a call with a function of the context.
func (a *api) enterFunction(call driver.Call, c driver.Context, h driver.Function) (*function, driver.Result) {
	if _, r := a.enterContext(call, c); r != driver.Success {
		return nil, r
	}
	f := a.m.functions[h]
	if f == nil {
		a.leave()
		return nil, driver.InvalidHandle
	}
	return f, driver.Success
}

func (a *api) FuncGetAttribute(c driver.Context, attribute driver.FuncAttribute, h driver.Function) (int32, driver.Result) {
	f, r := a.enterFunction(driver.CallFuncGetAttribute, c, h)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	switch attribute {
	case driver.FuncSharedBytes:
		return int32(f.entry.shared), driver.Success
	case driver.FuncMaxDynamicSharedBytes:
		return int32(f.dynamic), driver.Success
	case funcMaxThreads:
		return maxBlockThreads, driver.Success
	case funcConstant, funcLocal, funcRegisters:
		return 0, driver.Success
	}
	return 0, driver.InvalidValue
}

// Attributes that programs read and this library does not. Those of machine code are 0.
const (
	funcMaxThreads driver.FuncAttribute = 0
	funcConstant   driver.FuncAttribute = 2
	funcLocal      driver.FuncAttribute = 3
	funcRegisters  driver.FuncAttribute = 4
)

// FuncSetAttribute allows a kernel so much dynamic shared memory as the device has
// beside its static one.
func (a *api) FuncSetAttribute(c driver.Context, h driver.Function, attribute driver.FuncAttribute, value int32) driver.Result {
	f, r := a.enterFunction(driver.CallFuncSetAttribute, c, h)
	if r != driver.Success {
		return r
	}
	defer a.leave()
	most := uint64(f.module.context.device.attributes[driver.AttrSharedPerBlockOptIn])
	if attribute != driver.FuncMaxDynamicSharedBytes || value < 0 || uint64(value)+f.entry.shared > most {
		return driver.InvalidValue
	}
	f.dynamic = uint64(value)
	return driver.Success
}

func (a *api) OccupancyMaxActiveBlocksPerMultiprocessor(c driver.Context, h driver.Function, threads int32, shared uint64) (int32, driver.Result) {
	f, r := a.enterFunction(driver.CallOccupancyMaxActiveBlocksPerMultiprocessor, c, h)
	if r != driver.Success {
		return 0, r
	}
	defer a.leave()
	if threads <= 0 {
		return 0, driver.InvalidValue
	}
	return int32(f.blocksAtOnce(uint64(threads), shared)), driver.Success
}
