// Package bystander lets tests request what goes on beside them on the software driver:
// another library of the process captures a stream, and the machine looks for races.
package bystander

import "sync/atomic"

// Captures makes a software machine begin with such a capture. When the machine is
// closed, it reports a call that ended the capture.
var Captures atomic.Bool

// Races gives every software machine the option of that name. When the machine is closed,
// it reports work that raced.
var Races atomic.Bool
