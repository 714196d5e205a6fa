// Package fabric is about memory that is shared over an NVLink fabric, between
// processes of one host and between hosts.
//
// # What fabric handles need
//
// Memory that was created with a fabric handle (vmm.Properties.Handles) is
// imported by 64 bytes, anywhere on the fabric. Besides a GPU and a driver that
// have them, each process needs an IMEX channel: a device file that it may
// open, with the same number for all that share. Who may open it may import
// what the others share; the 64 bytes are no secret. On one host the file is
// all. Between hosts the nvidia-imex service and the fabric manager must run
// and agree.
//
// # Sharing
//
// The package handles shares memory by fabric handle: over a connection, or by a
// text, with a lease that keeps what it offers (handles.Lease). The package
// fabric/rendezvous has groups of ranks agree on the type of handle and map each
// other's memory. vmm.PreferFabric makes memory with a fabric handle where a
// trial finds that to work.
//
// # Diagnosis
//
// [Diagnose] says what of this is there, what is not, and what an administrator
// does about it:
//
//	d, err := fabric.Diagnose(fabric.Options{Trial: true}, sys.Devices()...)
//	...
//	fmt.Println(d)
//
// Where memory with a fabric handle cannot be created, the error carries the
// same findings: [Findings] takes them out. The state of the fabric comes from
// NVML, which is searched beside the driver, or where the environment variable
// CUVMM_LIBNVML says. The software driver reports on its own
// machine.
package fabric
