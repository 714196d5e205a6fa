package pages

import "github.com/cuvmm/cuvmm/internal/driver"

// watched tells a driver that names the mistakes of programs which places work may use. Under
// those of a range with a null page work may use all.
func (r *Range) watched(first, n int, inUse bool) {
	w, ok := r.System().Drv.(driver.Watcher)
	if !ok || r.null != nil {
		return
	}
	at, size := r.Base()+driver.Ptr(first)*driver.Ptr(r.Page()), uint64(n)*r.Page()
	if inUse {
		w.InUse(at, size)
	} else {
		w.OutOfUse(at, size, driver.Paged{Base: r.Base(), Page: r.Page(), Name: r.What()})
	}
}
