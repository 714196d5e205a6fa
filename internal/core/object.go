package core

import "github.com/cuvmm/cuvmm/internal/life"

// Object is a live object of a System. Owners embed one in their inner state.
type Object struct {
	life.Object
	sys *System
}

// Track puts an object of size bytes into the System's list of live objects.
func (s *System) Track(o *Object, kind life.Kind, size uint64) {
	o.sys = s
	s.Live.Add(&o.Object, kind, size, 1)
}

// System returns the object's System.
func (o *Object) System() *System { return o.sys }
