package sampletest

import "github.com/cuvmm/cuvmm/cuda/sim"

// poisoned is a machine on which memory that nothing was written to has no zeros.
var poisoned = sim.Options{Poison: true}

// table has a row for each sample, by its folder.
var table = map[string]row{
	"01-hello": {runs: []run{
		{name: "reads back", process: true, env: []string{"CUVMM_DRIVER=sim"},
			times: map[string]int{`^device 0 \(Software GPU\) holds \[1 2 3 4\] at 0x[0-9a-f]+, on the software driver`: 1}},
		{name: "output lost", process: true, env: []string{"CUVMM_DRIVER=sim"}, full: true, fails: "no space left on device"},
		{name: "unknown driver", process: true, env: []string{"CUVMM_DRIVER=gpu"}, fails: `use "auto", "real" or "sim"`},
		{args: []string{"-driver", "real"}, process: true, env: []string{"CUVMM_DRIVER=sim"},
			fails: `argument "-driver": none is taken; CUVMM_DRIVER=real`},
	}},
	"02-growable": {
		runs: []run{
			{name: "a file", args: []string{"-driver", "sim", "$FILE"}, input: 9<<20 + 123,
				says: []string{"software driver", "$FILE", "$SUM", "9437307", "verified"}},
			{name: "small steps", args: []string{"-driver", "sim", "-step", "64KiB", "$FILE"}, input: 9<<20 + 123,
				says: []string{"$SUM", "growths    4", "chunks     4", "committed  16 MiB"}},
			{name: "standard input", args: []string{"-driver", "sim", "-"}, input: 9<<20 + 123, says: []string{"standard input", "$SUM"}},
			{name: "its own executable", args: []string{"-driver", "sim"}, says: []string{"verified"}},
			{name: "nothing", args: []string{"-driver", "sim", "-"}, says: []string{"bytes      0", "verified"}},
			{name: "one step exactly", args: []string{"-driver", "sim", "-step", "1MiB", "-"}, input: 1 << 20,
				says: []string{"bytes      1048576", "verified"}},
			{name: "interrupt", on: &sim.Options{}, interrupt: "device ", fails: "interrupted after 0 bytes"},
			{args: []string{"-step", "0"}, fails: "positive size"},
			{args: []string{"a", "b"}, fails: "2 arguments given"},
			{args: []string{"-driver", "sim", "$DIR/absent"}, fails: "no such file"},
			{args: []string{"-driver", "sim", "$DIR"}, fails: "is a directory"},
		},
		faults: map[string]int{"cuMemAddressReserve": 0, "cuMemCreate": 1, "cuMemMap": 1, "cuMemSetAccess": 1,
			"cuStreamCreate": 0, "cuMemcpyHtoDAsync": 1, "cuMemcpyDtoHAsync": 0},
	},
	"03-kernel": {
		runs: []run{
			{args: []string{"-n", "1"}, on: &poisoned, says: []string{"blocks of 256 threads", "verified   y = 2x + y in 1 elements"}},
			{args: []string{"-n", "255"}, on: &poisoned, says: []string{"blocks of 256 threads", "verified   y = 2x + y in 255 elements"}},
			{args: []string{"-n", "257"}, on: &poisoned, says: []string{"blocks of 256 threads", "verified   y = 2x + y in 257 elements"}},
			{args: []string{"-n", "100000"}, on: &poisoned, says: []string{"blocks of 256 threads", "verified   y = 2x + y in 100000 elements"}},
			{args: []string{"-driver", "real"}, gpu: true},
			{args: []string{"-n", "0"}, fails: "use 1 to"},
			{args: []string{"-n", "99999999999"}, fails: "use 1 to"},
		},
		faults: map[string]int{"cuModuleLoadData": 0, "cuModuleGetFunction": 0, "cuStreamCreate": 0, "cuMemAddressReserve": 1,
			"cuMemCreate": 1, "cuMemcpyHtoDAsync": 1, "cuLaunchKernel": 0, "cuMemcpyDtoHAsync": 0},
	},
	"04-pool": {
		runs: []run{
			{name: "nothing is copied", on: &poisoned, seeds: 8, calls: map[string]int{"cuMemcpyDtoDAsync": 0},
				says: []string{"next block: true", "4 blocks of 8 MiB, in 32 MiB", "still in 32 MiB", "verified   every block",
					"32 MiB went back to the driver, 0 MiB stay"}},
		},
		faults: map[string]int{"cuMemCreate": 2, "cuMemAddressReserve": 0, "cuMemMap": 3, "cuMemSetAccess": 2,
			"cuStreamCreate": 0, "cuMemsetD8Async": 5, "cuMemcpyDtoHAsync": 2},
	},
	"05-pool-capture": {
		runs: []run{
			{args: []string{"-replays", "2"}, on: &poisoned, seeds: 8,
				says: []string{"captured   1 request of 8 MiB at 0x", "replays    2, beside another stream, verified",
					"trimmed    the pool keeps 10 MiB", "destroyed  and 2 MiB: the graph's memory came back"}},
			{name: "interrupt", on: &sim.Options{}, interrupt: "device ", fails: "interrupted after 0 of 3 replays"},
			{args: []string{"-driver", "sim", "-replays", "0"}, fails: "at least 1"},
		},
		faults: map[string]int{"cuMemCreate": 0, "cuMemAddressReserve": 0, "cuMemMap": 1, "cuMemSetAccess": 0,
			"cuStreamCreate": 1, "cuStreamBeginCapture": 0, "cuGraphInstantiateWithFlags": 0, "cuGraphLaunch": 1,
			"cuMemcpyDtoHAsync": 1, "cuMemsetD8Async": 2},
	},
	"06-aliasing": {
		runs: []run{
			{name: "both addresses", on: &poisoned, seeds: 8, says: []string{"memory     2 MiB, at 0x"}, times: map[string]int{"verified": 2}},
		},
		faults: map[string]int{"cuMemCreate": 0, "cuMemAddressReserve": 0, "cuMemMap": 1, "cuMemSetAccess": 0,
			"cuModuleLoadData": 0, "cuModuleGetFunction": 1, "cuStreamCreate": 1, "cuEventRecord": 0, "cuStreamWaitEvent": 0,
			"cuLaunchKernel": 1, "cuMemcpyDtoHAsync": 0},
	},
	"07-compressible": {
		runs: []run{
			{name: "granted", on: compression(1), says: []string{"supported  true", "requested  32 MiB, compressible: true",
				"granted    compressible: true", "verified   8388608 words"}},
			{name: "refused", on: compression(0), says: []string{"supported  false", "requested  32 MiB, compressible: true",
				"granted    compressible: false", "plain memory", "verified   8388608 words"}},
		},
		faults: map[string]int{"cuMemCreate": 0, "cuMemGetAllocationPropertiesFromHandle": 0, "cuMemAddressReserve": 0, "cuMemMap": 0,
			"cuMemSetAccess": 0, "cuModuleLoadData": 0, "cuModuleGetFunction": 0, "cuStreamCreate": 0, "cuLaunchKernel": 0,
			"cuMemcpyDtoHAsync": 0},
	},
	"08-vectoradd": {
		runs: []run{
			{name: "one device", on: devices(sim.DeviceOptions{}), calls: map[string]int{"cuMemSetAccess": 1},
				says: []string{"12 MiB", "every device to everything", "device 0 (Software GPU): chunks [0 1] of each vector",
					"in 1048576 elements"}},
			{name: "three devices", on: devices(make([]sim.DeviceOptions, 3)...), calls: map[string]int{"cuMemSetAccess": 1},
				says: []string{"36 MiB", "device 0 (Software GPU): chunks [0 3]", "device 2 (Software GPU): chunks [2 5]",
					"in 3145728 elements"}},
			{name: "two that cannot reach each other", on: devices(sim.DeviceOptions{}, sim.DeviceOptions{Unreachable: []int{0}}),
				calls: map[string]int{"cuMemSetAccess": 12},
				says:  []string{"each device to what it owns", "device 1 (Software GPU): chunks [1 3]", "in 2097152 elements"}},
			{name: "two of different granularity", on: devices(sim.DeviceOptions{}, sim.DeviceOptions{Granularity: 4 << 20}),
				calls: map[string]int{"cuMemSetAccess": 1}, says: []string{"48 MiB", "verified"}},
			{args: []string{"-driver", "sim"},
				says: []string{"software driver", "24 MiB", "device 1 (Software GPU): chunks [1 3]", "verified   c = a + b"}},
		},
		faults: map[string]int{"cuMemAddressReserve": 0, "cuMemCreate": 1, "cuMemMap": 1, "cuMemSetAccess": 0,
			"cuModuleLoadData": 1, "cuModuleGetFunction": 1, "cuStreamCreate": 1, "cuMemcpyHtoDAsync": 1, "cuLaunchKernel": 1,
			"cuMemcpyDtoHAsync": 1},
		faultsOn: sim.Options{Devices: make([]sim.DeviceOptions, 2)},
	},
	"09-send": {
		runs: []run{
			{args: []string{"-driver", "sim"},
				says:  []string{"sender     process $PID, 1000 elements at 0x", "verified   the other process doubled all 1000 elements"},
				never: []string{"receiver   process $PID,"},
				times: map[string]int{`receiver   process \d+, 1000 elements at 0x`: 1}},
			{args: []string{"-driver", "real"}, gpu: true},
		},
		faults:    map[string]int{"cuMemAddressReserve": 0, "cuMemCreate": 0, "cuMemExportToShareableHandle": 0, "cuMemcpyDtoHAsync": 0},
		faultArgs: []string{"-driver", "sim"},
	},
	"10-ipc": {runs: []run{
		follows("several pieces", 5<<20+123, ": bytes 5243003, changes "),
		follows("one piece", 1000, ": bytes 1000, changes "),
		follows("nothing", 0, ": bytes 0, changes "),
		follows("many small pieces", 1<<20, ": bytes 1048576, changes ", "-step", "10000"),
		{args: []string{"-step", "0"}, fails: "positive size"},
		{args: []string{"a", "b"}, fails: "2 arguments given"},
		{args: []string{"-driver", "sim", "$DIR/absent"}, fails: "no such file"},
		// The child and the connection end because the input breaks off: the error does not name them.
		{args: []string{"-driver", "sim", "$DIR"}, fails: "is a directory"},
		{name: "output lost", args: []string{"-driver", "sim"}, full: true, fails: "write /dev/full"},
	}},
	"11-ipc-server": {runs: []run{
		{args: []string{"-driver", "sim"}, says: []string{"generation 12: ", "every element as it should be"},
			times: map[string]int{": withdrawn": 2}},
		{name: "the publisher fails", args: []string{"-driver", "sim", "-name", "\xff"}, fails: "exit status 1",
			says: []string{"bytes of UTF-8"}},
		// An interrupt ends the processes in order: none of them reports an error.
		{name: "interrupt", args: []string{"-driver", "sim"}, process: true, interrupt: "every element as it should be",
			never: []string{"11-ipc-server:"}},
		{args: []string{"-step", "0", "publish"}, fails: "-step must be positive"},
		{args: []string{"-most", "1", "publish"}, fails: "-step 262144 -most 1 "},
		{args: []string{"-step", "0"}, fails: "-step must be positive"},
		{args: []string{"-most", "9999999999"}, fails: "at most 4294967296"},
		{args: []string{"publish", "-name", "x"}, fails: "flags come first"},
		{args: []string{"watch"}, fails: `command "watch"`},
		{args: []string{"-driver", "sim", "-dir", "$DIR/absent", "follow"}, fails: "no such file"},
		{name: "output lost", args: []string{"-driver", "sim"}, full: true, fails: "write /dev/full"},
	}},
	"12-managed": {
		runs: []run{
			{name: "every placement", args: []string{"-layers", "2", "-mib", "1"}, on: &poisoned, seeds: 4,
				says: []string{
					"placement  none\n  before   layer 0 [........]  layer 1 [........]  scratch [........]\n" +
						"  after    layer 0 [DDDDDDDD]  layer 1 [DDDDDDDD]  scratch [HHHHHHHH]\n",
					"placement  GPU first, CPU mapped\n  before   layer 0 [DDDDDDDD]",
					"placement  read mostly\n  before   layer 0 [rrrrrrrr]",
					"placement  a callback: halves\n  before   layer 0 [hhhh....]",
					"verified 3 is the sum of the layers, which have 2 MiB",
				}},
			{name: "a driver without discard", args: []string{"-layers", "2", "-mib", "1"}, on: &older,
				says: []string{"needs a driver for CUDA 13.0"}, times: map[string]int{"verified": 4}},
			{args: []string{"-layers", "0", "-driver", "sim"}, fails: "use 1 to 100 layers, of 1 to 1024 MiB"},
			{args: []string{"-layers", "101", "-driver", "sim"}, fails: "use 1 to 100 layers, of 1 to 1024 MiB"},
			{args: []string{"-mib", "0", "-driver", "sim"}, fails: "use 1 to 100 layers, of 1 to 1024 MiB"},
			{args: []string{"-mib", "2000", "-driver", "sim"}, fails: "use 1 to 100 layers, of 1 to 1024 MiB"},
		},
		faults: map[string]int{"cuMemAllocManaged": 3, "cuMemAdvise": 0, "cuMemPrefetchBatchAsync": 1, "cuMemRangeGetAttribute": 5,
			"cuMemRangeGetAttributes": 7, "cuMemDiscardAndPrefetchBatchAsync": 0, "cuLaunchKernel": 1, "cuMemsetD8Async": 0,
			"cuStreamCreate": 1},
		faultArgs: []string{"-layers", "2", "-mib", "1"},
	},
	"13-fabric": {runs: []run{
		{args: []string{"-driver", "sim"},
			says: []string{"software driver", "offer      an array of int32", "by fabric", "imported   1000 elements",
				"receipt    from process", "verified"},
			never: []string{"fallback", "cuvmmoffer"}}, // a handle is a secret
		{args: []string{"-driver", "sim", "-channel", "-1"},
			says: []string{"fallback   descriptors", "NOT_PERMITTED", "there is no channel in", "imported   1000 elements", "verified"}},
		{args: []string{"-driver", "sim", "-channel", "2", "-diagnose"},
			says: []string{"ok: import: device 0: it was imported", "fabric handles work: true"}},
		{args: []string{"-driver", "sim", "-channel", "-1", "-diagnose"},
			says: []string{"problem: nodes: there is no channel", "problem: create: device 0", "fabric handles work: false"}},
		{args: []string{"-driver", "real"}, gpu: true, says: []string{"verified"}},
		{args: []string{"-driver", "real", "-diagnose"}, gpu: true},
		{name: "interrupt", args: []string{"-driver", "sim"}, interrupt: "device ", fails: "context canceled"},
		{args: []string{"more"}, fails: `argument "more"`},
		{args: []string{"-driver", "sim", "-folder", "/dev/null"}, fails: "/dev/null"},
		{args: []string{"-as", "importer", "-driver", "sim", "-offer", "what"}, process: true, fails: "pass the text of MarshalText"},
	}},
	"14-multicast": {
		runs: []run{
			{args: []string{"-n", "1000"}, on: multicast(), seeds: 4, calls: map[string]int{"cuMemcpyDtoDAsync": 12}, // 3 for each device
				says: []string{"vector     of length 4000", "copies     each device sends 24 bytes and receives 24",
					"multicast  each device sends 36 bytes and receives 24",
					"verified   every device has the norm, the same in both ways"}},
			{name: "devices without multicast", args: []string{"-n", "100"}, on: devices(make([]sim.DeviceOptions, 2)...),
				says: []string{"multicast  not used: ", "verified   every device has the norm\n"}},
			{args: []string{"-driver", "sim", "-n", "5000"}, says: []string{"software driver", "length 20000", "same in both ways"}},
			{args: []string{"-driver", "sim", "-n", "0"}, fails: "1 to"},
		},
		faults: map[string]int{"cuMemCreate": 4, "cuMemAddressReserve": 9, "cuMemMap": 8, "cuMemSetAccess": 5,
			"cuModuleLoadData": 4, "cuModuleGetFunction": 10, "cuStreamCreate": 1, "cuLaunchKernel": 10, "cuMemcpyDtoDAsync": 3,
			"cuMulticastCreate": 0, "cuMulticastAddDevice": 2, "cuMulticastBindMem_v1": 1},
		faultsOn:  sim.WithMulticast(4),
		faultArgs: []string{"-n", "100"},
	},
	"15-vector-index": {
		runs: []run{
			{args: []string{"-driver", "sim"},
				says:  []string{"verified   3 readers found each of 4096 vectors once, appended by 4 writers"},
				times: map[string]int{`(?m)^reader     process \d+, the index is at 0x`: 3}},
		},
		faults:    map[string]int{"cuMemAddressReserve": 0, "cuMemCreate": 0, "cuStreamCreate": 0, "cuMemcpyHtoDAsync": 0},
		faultArgs: []string{"-driver", "sim"},
	},
	"16-kv-cache": {
		runs: []run{
			{name: "shared prompt", on: &poisoned,
				says: []string{"20000 tokens in 10 MiB", "4 of 20050 tokens",
					"18 MiB with the prompt, of which each sequence shares 8 MiB; apart they would have 50 MiB",
					"gave back 2 MiB", "verified   every sequence"}},
			{args: []string{"-prompt", "1"}, on: &sim.Options{}},
			{args: []string{"-prompt", "4096"}, on: &sim.Options{}},
			{args: []string{"-prompt", "4097", "-stay", "1ms"}, on: &sim.Options{}},
			{args: []string{"-driver", "sim", "-prompt", "0"}, fails: "use 1 to"},
			{args: []string{"-driver", "sim", "-prompt", "9999999"}, fails: "use 1 to"},
		},
		faults: map[string]int{"cuMemCreate": 6, "cuMemAddressReserve": 3, "cuMemMap": 8, "cuMemSetAccess": 2,
			"cuStreamCreate": 0, "cuMemcpyDtoDAsync": 1, "cuMemcpyHtoDAsync": 20},
	},
	"17-sidecar": {runs: []run{
		{args: []string{"-driver", "sim"}, says: []string{"kills the publisher", "goes on after", "at the same address: true"}},
	}},
	"18-two-tenants": {runs: []run{
		{args: []string{"-driver", "sim"},
			says:  []string{"so that 97 MiB of GPU memory are free", "turn 0: 33 MiB of the GPU's are free", "33 MiB of GPU memory in each turn of tenant 0, within 0 KiB", "verified   each of 2 tenants found all of its 64 MiB in each of 3 turns"},
			times: map[string]int{`(?m)^tenant     \d is awake: out .*, in .*, hand-over `: 6}},
		{name: "together", args: []string{"-driver", "sim", "-together", "-tenants", "3", "-turns", "2", "-mib", "16"},
			says: []string{"verified   each of 3 tenants found all of its 16 MiB in each of 2 turns"}},
		{name: "a reader", args: []string{"-driver", "sim", "-reader", "-tenants", "2", "-turns", "2", "-mib", "16"},
			says: []string{"in each turn of tenant 0, within 0 KiB", "verified   each of 2 tenants", "verified   the reader found all"}},
		{name: "alone", args: []string{"-driver", "sim", "-tenants", "1", "-mib", "16"}, says: []string{"verified   each of 1 tenants"}},
		{args: []string{"-driver", "real", "-mib", "1024", "-reader"}, gpu: true, says: []string{"verified   each of 2", "verified   the reader"}},
		{args: []string{"-turns", "0"}, fails: "at least 1 of each"},
		{args: []string{"-mib", "20"}, fails: "a multiple of 16 MiB"},
		{name: "output lost", args: []string{"-driver", "sim", "-mib", "16"}, full: true, fails: "write /dev/full"},
	}},
	"19-weights": {
		runs: []run{
			{args: []string{"-driver", "sim"},
				says:  []string{"loaded     2 tensors in 66560 bytes, process $PID", "verified   every tensor has the digest that it was loaded with"},
				never: []string{"follower   process $PID,"},
				times: map[string]int{`follower   process \d+, 2 tensors in memory at 0x`: 1}},
			{args: []string{"-driver", "real"}, gpu: true, says: []string{"verified"}},
			{args: []string{"-driver", "sim", "$DIR/absent"}, fails: "no such file"},
			{args: []string{"-driver", "sim", "$DIR"}, fails: "neither model.safetensors.index.json nor model.safetensors"},
			{args: []string{"a", "b"}, fails: "2 arguments given"},
			{name: "output lost", args: []string{"-driver", "sim"}, full: true, fails: "write /dev/full"},
		},
		faults:    map[string]int{"cuMemAddressReserve": 0, "cuMemCreate": 1, "cuMemHostRegister": 0, "cuMemcpyHtoDAsync": 1, "cuStreamCreate": 0},
		faultArgs: []string{"-driver", "sim"},
	},
	"20-kv-pages": {
		runs: []run{
			{name: "evicts", on: &smallPages, says: []string{"slot 0     ░░█\n", "pages      64 were made"},
				times: map[string]int{`verified   64 sequences, and [1-9]\d* times that one was evicted`: 1}},
			{args: []string{"-pages", "1000", "-tokens", "4000"}, on: &smallPages, says: []string{"verified   64 sequences, and 0 times that one was evicted"}},
			{args: []string{"-tokens", "0"}, on: &smallPages, says: []string{"verified   64 sequences"}},
			{args: []string{"-driver", "real"}, gpu: true, says: []string{"verified"}},
			{args: []string{"-driver", "sim", "-pages", "8"}, fails: "budget exhausted"},
			{args: []string{"-driver", "sim", "-pages", "0"}, fails: "1 page or more"},
			{args: []string{"-driver", "sim", "-tokens", "99999"}, fails: "use 0 to 65536 tokens"},
		},
		faults: map[string]int{"cuMemCreate": 20, "cuMemAddressReserve": 3, "cuMemMap": 30, "cuMemSetAccess": 20, "cuModuleLoadData": 0,
			"cuModuleGetFunction": 0, "cuStreamCreate": 0, "cuLaunchKernel": 10, "cuMemcpyDtoDAsync": 1, "cuMemcpyHtoDAsync": 20, "cuMemcpyDtoHAsync": 2},
		faultsOn:  smallPages,
		faultArgs: []string{"-tokens", "4000"},
	},
	"21-broker": {
		runs: []run{
			{args: []string{"-driver", "sim"},
				says:  []string{"killed the engine", "verified   both engines answered from the same weights"},
				times: map[string]int{`engine     process \d+ loaded the weights, 67108864 bytes`: 1, `engine     process \d+ found the weights that process \d+ loaded`: 1}},
			{args: []string{"-driver", "sim", "-size", "1"}, says: []string{"verified"}},
			{args: []string{"-driver", "real"}, gpu: true, says: []string{"verified"}},
			{args: []string{"-driver", "sim", "-size", "0"}, fails: "size"},
			{args: []string{"a", "b"}, fails: "argument"},
		},
	},
}

// smallPages is a machine whose pages have 64 KiB, and memory that nothing was written to no zeros.
var smallPages = sim.Options{Poison: true, Devices: []sim.DeviceOptions{{Granularity: 64 << 10}}}

// older is a machine whose driver knows CUDA 12.1.
var older = sim.OlderDriver(12010)

func devices(o ...sim.DeviceOptions) *sim.Options { return &sim.Options{Devices: o} }

// compression returns a machine whose device has the attribute for compressible memory, or not.
func compression(can int) *sim.Options {
	const generic = 107 // the attribute's number
	return &sim.Options{Poison: true, Devices: []sim.DeviceOptions{{Attributes: map[int]int{generic: can}}}}
}

func multicast() *sim.Options {
	o := sim.WithMulticast(4)
	o.Poison = true
	return &o
}

// follows returns a run of 10-ipc, whose child follows so many bytes.
func follows(name string, bytes int, counted string, args ...string) run {
	return run{name: name, args: append(append([]string{"-driver", "sim"}, args...), "$FILE"), input: bytes,
		says:  []string{"software driver", "$FILE", "parent     process $PID, the array is at 0x", counted, "reply      $SUM", "verified"},
		never: []string{"child      process $PID,"}}
}
