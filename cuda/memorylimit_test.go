package cuda_test

import (
	"fmt"
	"testing"
	"testing/fstest"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

// The limit of a control group is that of the device whose address the kernel names.
func TestTheLimitOfAControlGroup(t *testing.T) {
	_, d := open(t, sim.Options{Devices: []sim.DeviceOptions{{Attributes: map[int]int{int(driver.AttrPCIBusID): 3}}, {}}})
	files := fstest.MapFS{
		"sys/fs/cgroup/dmem.max":     {Data: []byte("drm/0000:03:00.0/vram0 1000\n")},
		"sys/fs/cgroup/dmem.current": {Data: []byte("drm/0000:03:00.0/vram0 400\n")},
	}
	t.Cleanup(cuda.ReadDeviceLimits(files))
	l, limited, err := d.MemoryLimit()
	require.NoError(t, err)
	require.True(t, limited)
	require.Equal(t, cuda.MemoryLimit{Bytes: 1000, Used: 400, File: "/sys/fs/cgroup/dmem.max"}, l)
	require.Equal(t, 600, l.Remaining())
	require.Equal(t, 1000, cuda.NewBudget(l.Bytes, cuda.BudgetOptions{}).Stats().Limit)

	_, limited, err = d.System().Devices()[1].MemoryLimit()
	require.NoError(t, err)
	require.False(t, limited)

	files["sys/fs/cgroup/dmem.max"].Data = []byte("drm/0000:03:00.0/vram0 many\n")
	_, limited, err = d.MemoryLimit()
	require.ErrorContains(t, err, "dmem.max")
	require.False(t, limited)
}

// A budget keeps below what the control group permits, less what other libraries take.
func ExampleDevice_MemoryLimit() {
	sys := system()
	defer closing(sys)
	const others = 1 << 30
	l, limited, err := sys.Devices()[0].MemoryLimit()
	check(err)
	if !limited {
		l = cuda.MemoryLimit{Bytes: sys.Devices()[0].TotalMemory()}
	}
	budget := cuda.NewBudget(l.Bytes-others, cuda.BudgetOptions{Name: "device 0"})
	fmt.Println(budget.Stats().Limit>>30, "GiB")
	// Output:
	// 15 GiB
}
