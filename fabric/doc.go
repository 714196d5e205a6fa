// Package fabric finds out whether memory can be shared over an NVLink fabric, between
// processes of one host and between hosts.
//
// # What fabric handles need
//
// Memory that was created with a fabric handle (vmm.Properties.Handles) is
// imported by 64 bytes, anywhere on the fabric. Besides a GPU and a driver that
// have them, each process needs an IMEX channel: a device file that it may
// open, with the same number in all processes that share. Any process that may open it
// may import what the others share; the 64 bytes are no secret. On one host the file is
// enough. Between hosts the nvidia-imex service and the fabric manager must run
// and agree.
//
// # Sharing
//
// Package handles shares memory by fabric handle: over a connection, or by a
// text, with a lease that keeps the memory alive (handles.Lease). Package
// fabric/rendezvous has groups of ranks agree on the type of handle and map each
// other's memory. vmm.PreferFabric makes memory with a fabric handle if a
// trial shows that it works.
//
// # Diagnosis
//
// [Diagnose] lists what of this is present, what is missing, and the remedy for an
// administrator:
//
//	d, err := fabric.Diagnose(fabric.Options{Trial: true}, sys.Devices()...)
//	...
//	fmt.Println(d)
//
// If memory with a fabric handle cannot be created the error carries the same findings,
// which [Findings] returns. The state of the fabric comes from NVML, which is looked for
// beside the driver, or at the path in the environment variable CUVMM_LIBNVML. The
// software driver reports on its own machine.
package fabric
