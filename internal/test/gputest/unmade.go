package gputest

import (
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
)

// Unmade calls every method of objects that no function has made: nil pointers and
// zero values. A method must return ErrInvalidArgument and say that the object is nil or
// zero, whatever its arguments are; one that returns no error may return a value, or
// panic with such an error. Methods that are named in but ("Buffer.Len") are not called.
func Unmade(t *testing.T, objects []any, but ...string) {
	t.Helper()
	for _, o := range objects {
		v := reflect.ValueOf(o)
		for i := range v.NumMethod() {
			method := v.Type().Method(i).Name
			if method == "Format" || method == "Error" {
				continue // fmt and errors alone call these
			}
			owner, _, _ := strings.Cut(reflect.Indirect(reflect.New(v.Type())).Type().String(), "[")
			name := owner[strings.LastIndex(owner, ".")+1:] + "." + method
			if slices.Contains(but, name) {
				continue
			}
			t.Run(fmt.Sprintf("%T/%s", o, method), func(t *testing.T) {
				if err := called(v.Method(i)); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

var unmade = regexp.MustCompile(`: a (nil|zero) .*; `)

// called calls a method with zero arguments, and returns what is wrong with what it
// does.
func called(f reflect.Value) (wrong error) {
	in := make([]reflect.Value, f.Type().NumIn())
	for i := range in {
		in[i] = reflect.Zero(f.Type().In(i))
	}
	refusal := func(err error) error {
		if !errors.Is(err, cuda.ErrInvalidArgument) || !unmade.MatchString(err.Error()) {
			return fmt.Errorf("not ErrInvalidArgument for a nil or zero object, with a remedy: %w", err)
		}
		return nil
	}
	defer func() {
		switch p := recover().(type) {
		case nil:
		case runtime.Error:
			wrong = p
		case error:
			wrong = refusal(p)
		default:
			wrong = fmt.Errorf("panic: %v", p)
		}
	}()
	call := f.Call
	if f.Type().IsVariadic() {
		call = f.CallSlice
	}
	out := call(in)
	if n := len(out); n > 0 && f.Type().Out(n-1) == reflect.TypeFor[error]() {
		err, _ := out[n-1].Interface().(error)
		if err == nil {
			return errors.New("it succeeds")
		}
		return refusal(err)
	}
	return nil
}
