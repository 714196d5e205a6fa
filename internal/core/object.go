package core

import "github.com/cuvmm/cuvmm/internal/life"

// Object is a live object of a System. Owners embed one in their inner state.
type Object struct {
	life.Object
	sys *System
}

// Owner is what embeds an Object.
type Owner interface {
	life.Owner
	tracked() *Object
}

func (o *Object) tracked() *Object { return o }

// Track puts an owner of size bytes into the System's list of live objects.
func (s *System) Track(owner Owner, kind life.Kind, size uint64) {
	owner.tracked().sys = s
	s.Live.Add(owner, kind, size, 1)
}

// System returns the object's System.
func (o *Object) System() *System { return o.sys }
