package inspect_test

import (
	"bytes"
	"encoding/json"
	"reflect"
	"testing"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/stretchr/testify/require"
)

// Every field of a snapshot has a name in one style, however deep it lies.
func TestFieldsHaveNamesOfOneStyle(t *testing.T) {
	seen := map[reflect.Type]bool{}
	var check func(of reflect.Type)
	check = func(of reflect.Type) {
		switch of.Kind() {
		case reflect.Slice, reflect.Pointer:
			check(of.Elem())
			return
		case reflect.Struct:
		default:
			return
		}
		if seen[of] || of.PkgPath() == "time" {
			return
		}
		seen[of] = true
		for i := range of.NumField() {
			f := of.Field(i)
			require.Regexp(t, `^[a-z]+(_[a-z]+)*(,omitempty)?$`, f.Tag.Get("json"), "%v.%s", of, f.Name)
			check(f.Type)
		}
	}
	check(reflect.TypeFor[inspect.Snapshot]())
	require.Greater(t, len(seen), 15)
}

// What is unknown is left out.
func TestUnknownFieldsAreLeftOut(t *testing.T) {
	s := inspect.Snapshot{Format: inspect.Format, Version: inspect.Version, Devices: make([]inspect.Device, 1),
		Publications: []inspect.Publication{{Followers: make([]inspect.Reader, 1)}}, Followers: make([]inspect.Follower, 1), Leftovers: make([]inspect.Leftover, 1)}
	var text bytes.Buffer
	require.NoError(t, s.Write(&text))
	var all struct {
		Devices      []map[string]any
		Publications []struct{ Followers []map[string]any }
		Followers    []map[string]any
		Leftovers    []map[string]any
	}
	require.NoError(t, json.Unmarshal(text.Bytes(), &all))
	require.NotContains(t, all.Devices[0], "free")
	require.NotContains(t, all.Publications[0].Followers[0], "uid")
	require.NotContains(t, all.Publications[0].Followers[0], "pid")
	require.NotContains(t, all.Followers[0], "pid")
	require.NotContains(t, all.Leftovers[0], "device")

	none, uid := 0, 1000 // which are known
	s.Devices[0].Free, s.Publications[0].Followers[0].UID, s.Leftovers[0].Device = &none, &uid, &none
	text.Reset()
	require.NoError(t, s.Write(&text))
	back, err := inspect.Read(&text)
	require.NoError(t, err)
	require.Equal(t, s, back)
}
