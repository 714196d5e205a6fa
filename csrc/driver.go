package csrc

import "github.com/cuvmm/cuvmm/internal/driver"

// Driver is the real driver. It is opaque: package cuda calls it, and makes a System on it.
// It is never closed.
type Driver struct{ holder }

type holder = driver.Holder
