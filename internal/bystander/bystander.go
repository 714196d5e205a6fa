// Package bystander lets tests request a bystander of the software driver: another library of the process, which captures a stream while the test runs.
package bystander

import "sync/atomic"

// Captures makes a software machine begin with such a capture. When the machine is
// closed, it reports a call that ended the capture.
var Captures atomic.Bool
