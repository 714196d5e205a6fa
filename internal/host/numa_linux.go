package host

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// CurrentNode is the NUMA node of the processor that the calling thread runs on
// now.
func CurrentNode() (int, error) {
	var cpu, node uint32
	if _, _, errno := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&cpu)), uintptr(unsafe.Pointer(&node)), 0); errno != 0 {
		return 0, fmt.Errorf("ask for the thread's NUMA node: %w", errno)
	}
	return int(node), nil
}

// Nodes are the NUMA nodes of the machine that have memory. One without NUMA has
// node 0.
func Nodes() ([]int, error) {
	const list = "/sys/devices/system/node/has_memory"
	text, err := os.ReadFile(list)
	if os.IsNotExist(err) {
		return []int{0}, nil
	}
	if err != nil {
		return nil, err
	}
	nodes, err := parseNodes(strings.TrimSpace(string(text)))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", list, err)
	}
	return nodes, nil
}

// parseNodes reads the kernel's form of a list: "0-1,4".
func parseNodes(list string) (nodes []int, err error) {
	for _, part := range strings.Split(list, ",") {
		first, last, isRange := strings.Cut(part, "-")
		lo, err := strconv.Atoi(first)
		if err != nil {
			return nil, err
		}
		hi := lo
		if isRange {
			if hi, err = strconv.Atoi(last); err != nil {
				return nil, err
			}
		}
		const most = 1 << 12 // more than any kernel is built for
		if lo < 0 || hi < lo || hi >= most {
			return nil, fmt.Errorf("nodes %q", part)
		}
		for n := lo; n <= hi; n++ {
			nodes = append(nodes, n)
		}
	}
	return nodes, nil
}

// Prefer makes pages of the memory that do not exist yet come from the node, or from another
// if that has none free. mem begins at a page.
func Prefer(mem []byte, node int) error {
	const preferred, most = 1, 1 << 10 // MPOL_PREFERRED; nodes in the mask
	if node < 0 || node >= most {
		return fmt.Errorf("prefer memory of node %d: nodes are from 0 to %d", node, most-1)
	}
	var mask [most / 64]uint64
	mask[node/64] = 1 << (node % 64)
	// The kernel reads one bit less than it is told.
	if _, _, errno := unix.Syscall6(unix.SYS_MBIND, uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)),
		preferred, uintptr(unsafe.Pointer(&mask[0])), most+1, 0); errno != 0 {
		return fmt.Errorf("prefer memory of node %d: %w", node, errno)
	}
	return nil
}
