// Package drivertest is the conformance suite of the two drivers: every rule of
// docs/driver-facts.md as a case against the [driver.Driver] interface.
//
// The rules were measured on the real driver. The suite runs on the software
// driver in cuda/sim and, where there is a GPU, on the real one in csrc:
//
//	go test ./cuda/sim -run TestConformance
//	go test ./csrc -run TestConformance
//
// A rule that the two disagree on is a bug in the software driver.
//
// A case is skipped only for a [Need] that the machine does not meet, never
// because a call failed: where an attribute says that a feature is there, a
// failing call is a failing case. CUVMM_REQUIRE_GPU=n turns a missing driver,
// and fewer than n devices, into a failure. CUVMM_CASES_OUT=file appends the
// results of a run to the file as a table in Markdown, in the order of the
// cases and with nothing in it that changes from run to run.
//
// Rules about cost are benchmarks, in [Bench].
package drivertest
