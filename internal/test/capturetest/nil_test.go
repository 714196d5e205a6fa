package capturetest

import (
	"context"
	"errors"
	"go/ast"
	"io"
	"reflect"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/fabric"
	"github.com/cuvmm/cuvmm/fabric/rendezvous"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/handles/publish"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/managed"
	"github.com/cuvmm/cuvmm/multicast"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/stretchr/testify/require"
)

// takers are the functions that take something which can be nil.
var takers = map[string]any{
	"cuda.Open":       cuda.Open,
	"cuda/auto.Open":  auto.Open,
	"fabric.Diagnose": fabric.Diagnose, "fabric.Findings": fabric.Findings,
	"fabric/rendezvous.Agree": rendezvous.Agree, "fabric/rendezvous.FactsOf": rendezvous.FactsOf,
	"fabric/rendezvous.Share": rendezvous.Share,
	"handles/peer.Dial":       peer.Dial, "handles/peer.DialWait": peer.DialWait, "handles/publish.Follow": publish.Follow[int32],
	"handles.ImportArray":  handles.ImportArray[int32],
	"handles.ImportBuffer": handles.ImportBuffer, "handles/peer.Inherit": peer.Inherit,
	"handles.LeaseArray":  handles.LeaseArray[int32],
	"handles.LeaseBuffer": handles.LeaseBuffer, "handles/peer.Listen": peer.Listen, "handles/peer.Pair": peer.Pair,
	"handles/publish.Dial": publish.Dial, "handles/publish.TakeOver": publish.TakeOver[int32],
	"handles/publish.NewClient": publish.NewClient, "handles/publish.NewServer": publish.NewServer,
	"handles/publish.Open": publish.Open[int32], "handles/publish.Array": publish.Array[int32],
	"handles.ReceiveArray":  handles.ReceiveArray[int32],
	"handles.ReceiveBuffer": handles.ReceiveBuffer,
	"handles.SendArray":     handles.SendArray[int32], "handles.SendBuffer": handles.SendBuffer,
	"handles/peer.TraceFDs": peer.TraceFDs, "handles/peer.CloseAll": peer.CloseAll,
	"inspect.Take": inspect.Take, "inspect.Summarize": inspect.Summarize,
	"managed.ArrayOf": managed.ArrayOf[int32], "managed.NewArray": managed.NewArray[int32],
	"managed.New": managed.New, "managed.NewAllocator": managed.NewAllocator, "managed.View": managed.View,
	"managed.GPUFirst": managed.GPUFirst, "managed.ReadMostly": managed.ReadMostly,
	"managed.DiscardBatch": managed.DiscardBatch, "managed.DiscardPrefetchBatch": managed.DiscardPrefetchBatch,
	"managed.PrefetchBatch": managed.PrefetchBatch,
	"multicast.Create":      multicast.Create, "multicast.Granularity": multicast.Granularity,
	"multicast.Import": multicast.Import, "multicast.ImportFabric": multicast.ImportFabric,
	"multicast.NewTeam": multicast.NewTeam, "multicast.Supported": multicast.Supported,
	"vmm.ArrayOf": vmm.ArrayOf[int32], "vmm.Create": vmm.Create, "vmm.GranularityOf": vmm.GranularityOf,
	"vmm.NewArray": vmm.NewArray[int32], "vmm.NewBuffer": vmm.NewBuffer,
	"vmm.NewReader": vmm.NewReader, "vmm.NewWriter": vmm.NewWriter, "vmm.Reserve": vmm.Reserve,
	"vmm/pool.New": pool.New,
}

// object is a type whose methods take something that can be nil, and how a value
// of it is made, which others are also given.
type object struct {
	of   reflect.Type
	make func(w *world) any
}

func an[T any](make func(w *world) T) object {
	return object{reflect.TypeFor[T](), func(w *world) any { return make(w) }}
}

var objects = []object{
	an(func(w *world) *cuda.System { return w.dev.System() }),
	an(func(w *world) *cuda.Device { return w.dev }),
	an((*world).stream), an((*world).event), an((*world).graph), an((*world).module), an((*world).kernel),
	an(func(w *world) *cuda.HostBuffer { return w.host(100) }),
	an((*world).buffer), an((*world).array), an((*world).slice), an((*world).allocation), an((*world).reservation),
	an(func(w *world) *vmm.Mapping { return w.mapping(w.reservation()) }),
	an(func(w *world) *vmm.Reader { return vmm.NewReader(w.buffer()) }),
	an(func(w *world) *vmm.Writer { return vmm.NewWriter(w.buffer()) }),
	an(func(w *world) *publish.Client { _, k := w.published(); return k }),
	an(func(w *world) *peer.Conn { c, _ := w.pair(); return c }),
	an((*world).fd), an((*world).follower), an((*world).lease), an((*world).listener), an((*world).publication), an((*world).server),
	an((*world).managed), an((*world).managedArray), an((*world).allocator),
	an(func(w *world) managed.AccessedBy { return w.managed().AccessedBy() }),
	an(func(w *world) managed.Range { return w.managed().Range }),
	an((*world).pool), an((*world).poolCapture), an((*world).workspaces),
	an((*world).multicast), an((*world).binding), an((*world).team), an((*world).group),
}

// A nil in place of an argument panics nowhere: where it means nothing by
// ErrInvalidArgument, with what to pass instead, and never by a panic. Nor does
// the zero value of a struct panic.
func TestNilArgumentsAreAnswered(t *testing.T) {
	for name, f := range takers {
		everyNil(t, name, func(*world) reflect.Value { return reflect.ValueOf(f) })
	}
	for _, o := range objects {
		for i := range o.of.NumMethod() {
			if o.of.Method(i).Name == "Format" {
				continue // fmt alone calls it
			}
			everyNil(t, o.of.String()+"."+o.of.Method(i).Name, func(w *world) reflect.Value { return reflect.ValueOf(o.make(w)).Method(i) })
		}
	}
}

// Every function that takes pointers or functions, and every type with such a
// method, is among those.
func TestNoTakerOfNilIsForgotten(t *testing.T) {
	types := map[string]bool{}
	for _, o := range objects {
		of := o.of
		if of.Kind() == reflect.Pointer {
			of = of.Elem()
		}
		name, _, _ := strings.Cut(of.Name(), "[")
		types[strings.TrimPrefix(of.PkgPath(), "github.com/cuvmm/cuvmm/")+"."+name] = true
	}
	for folder, names := range sources(t) {
		if folder == "vmm/pool/pooltest" {
			continue // a test that passes nil there is to end
		}
		for name, f := range names {
			owner, _, method := strings.Cut(name, ".")
			if canBeNil(f) && takers[folder+"."+name] == nil && !(method && types[folder+"."+owner]) {
				t.Errorf("%s.%s takes what can be nil: add it to takers, or its type to objects", folder, name)
			}
		}
	}
}

// canBeNil reports whether a parameter is a pointer, a function, or some of them.
func canBeNil(f *ast.FuncType) (can bool) {
	ast.Inspect(f.Params, func(n ast.Node) bool {
		switch n.(type) {
		case *ast.StarExpr, *ast.FuncType:
			can = true
		}
		return true
	})
	return can
}

// everyNil calls the function once for each parameter that can be nil.
func everyNil(t *testing.T, name string, of func(w *world) reflect.Value) {
	for i, n := 0, 1; i < n; i++ {
		t.Run(name, func(t *testing.T) {
			m, err := sim.New(sim.WithMulticast(1))
			require.NoError(t, err)
			w := &world{TB: t}
			w.dev = made[*cuda.System](w)(m.OpenOwned(cuda.Options{})).Devices()[0]
			f := of(w)
			if n = f.Type().NumIn(); n == 0 {
				return
			}
			in := make([]reflect.Value, n)
			for j := range in {
				in[j] = w.argument(f.Type().In(j))
			}
			p := f.Type().In(i)
			switch p.Kind() {
			case reflect.Slice:
				in[i] = reflect.Append(reflect.Zero(p), reflect.Zero(p.Elem()))
			case reflect.Pointer, reflect.Func, reflect.Interface, reflect.Struct:
				in[i] = reflect.Zero(p)
			default:
				return
			}
			if p == reflect.TypeFor[context.Context]() || strings.HasSuffix(p.Name(), "Options") {
				return // a nil context is the caller's, and no options are the usual ones
			}
			call := f.Call
			if f.Type().IsVariadic() {
				call = f.CallSlice
			}
			var out []reflect.Value
			require.NotPanics(t, func() { out = call(in) }, "parameter %d, a nil %v", i, p)
			for _, o := range out {
				w.over(o)
			}
			switch p.Kind() {
			case reflect.Pointer, reflect.Func, reflect.Interface:
				if len(out) == 0 {
					return
				}
				err, failed := out[len(out)-1].Interface().(error)
				if failed && !errors.Is(err, cuda.ErrOutOfRange) { // as the zeros beside it are, where it may be nil
					require.ErrorIs(t, err, cuda.ErrInvalidArgument, "parameter %d, a nil %v", i, p)
					require.Contains(t, err.Error(), "; ", "no remedy")
				}
			}
		})
	}
}

// argument is something to pass that is not nil, where the type is one of those
// here, or one that a test of nil can do without.
func (w *world) argument(t reflect.Type) reflect.Value {
	for _, o := range objects {
		if o.of == t {
			return reflect.ValueOf(o.make(w))
		}
	}
	v := reflect.New(t).Elem()
	switch t.Kind() {
	case reflect.Interface:
		for _, some := range []any{w.soon(), strings.NewReader("text"), io.Discard, w.allocation()} {
			if reflect.TypeOf(some).Implements(t) {
				v.Set(reflect.ValueOf(some))
			}
		}
	case reflect.Func:
		v.Set(reflect.MakeFunc(t, func([]reflect.Value) (out []reflect.Value) {
			for i := range t.NumOut() {
				out = append(out, reflect.Zero(t.Out(i)))
			}
			return out
		}))
	case reflect.String:
		v.SetString("name")
	case reflect.Slice:
		v.Set(reflect.Append(v, w.argument(t.Elem())))
	}
	switch v.Addr().Interface().(type) {
	case *cuda.Location:
		v.Set(reflect.ValueOf(w.dev.Location()))
	case *rendezvous.Agreement:
		v.Set(reflect.ValueOf(rendezvous.Agreement{Handle: vmm.PosixFD}))
	case *cuda.Launch:
		v.Set(reflect.ValueOf(cuda.Threads(1)))
	case *vmm.Access:
		v.Set(reflect.ValueOf(w.access(vmm.ReadWrite)))
	}
	return v
}

// over ends what a call returned.
func (w *world) over(result reflect.Value) {
	if result.IsZero() {
		return
	}
	if result.Kind() == reflect.Slice {
		for i := range result.Len() {
			w.over(result.Index(i))
		}
	}
	for _, name := range []string{"End", "Close"} {
		if m := result.MethodByName(name); m.IsValid() {
			m.Call(nil)
		}
	}
}
