package suspend

import "reflect"

// Sealed is memory that users name. Only this library implements it.
type Sealed interface{ member() Member }

// Holder is embedded, unexported, by what users hold. Its only method is unexported, too, so
// other modules cannot reach the inner state.
type Holder struct{ m Member }

// Hold makes the holder.
func Hold(m Member) Holder { return Holder{m} }

func (h *Holder) member() Member { return h.m }

// Listed is what packages above vmm put into the System's list of live objects for memory that
// can be suspended.
type Listed interface {
	// Memory returns what the user has, or nil once it is closed.
	Memory() Sealed
}

// Of looks inside. It returns nil for a nil value, a nil pointer, and one that no function
// made.
func Of(s Sealed) Member {
	if v := reflect.ValueOf(s); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return nil
	}
	return s.member()
}
