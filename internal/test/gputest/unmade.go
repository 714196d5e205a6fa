package gputest

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/stretchr/testify/require"
)

// Unmade calls every method that returns an error of objects that no function has made:
// nil pointers and zero values. The method must return ErrInvalidArgument and say that the
// object is nil or zero, whatever its arguments are. Other methods are as undefined as
// those of a nil pointer.
func Unmade(t *testing.T, objects ...any) {
	t.Helper()
	for _, o := range objects {
		v := reflect.ValueOf(o)
		for i := range v.NumMethod() {
			if f := v.Method(i).Type(); f.NumOut() == 0 || f.Out(f.NumOut()-1) != reflect.TypeFor[error]() {
				continue
			}
			t.Run(fmt.Sprintf("%T/%s", o, v.Type().Method(i).Name), func(t *testing.T) {
				require.ErrorIs(t, called(v.Method(i)), cuda.ErrInvalidArgument)
				require.Regexp(t, `: a (nil|zero) .*; `, called(v.Method(i)))
			})
		}
	}
}

// called calls a method with zero arguments, and returns its error.
func called(f reflect.Value) error {
	in := make([]reflect.Value, f.Type().NumIn())
	for i := range in {
		in[i] = reflect.Zero(f.Type().In(i))
	}
	call := f.Call
	if f.Type().IsVariadic() {
		call = f.CallSlice
	}
	out := call(in)
	err, _ := out[len(out)-1].Interface().(error)
	return err
}
