package handles_test

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/test/vectors"
	"github.com/stretchr/testify/require"
)

func aManifest() handles.Manifest {
	return handles.Manifest{Bytes: 4096, Tensors: []handles.Tensor{
		{Name: "embed", Element: handles.BFloat16, Shape: []int{16, 32}, Digest: "crc32c:0a1b2c3d"},
		{Name: "scale", Element: handles.Float32, Offset: 1024},
		{Name: "empty", Element: handles.Float8E4M3, Shape: []int{0, math.MaxInt, math.MaxInt}, Offset: 1028},
		{Name: "é\n\"", Element: handles.Float8E5M2, Shape: []int{2044}, Offset: 1028, Kind: "buffer"},
		{Name: "head", Element: handles.BFloat16, Shape: []int{16, 32}, Strides: []int{1, 16}, Offset: 3072, Kind: "parameter", Alias: 1},
		{Name: "head.tied", Element: handles.BFloat16, Shape: []int{32, 16}, Offset: 3072, Alias: 1},
		{Name: "head.row", Element: handles.BFloat16, Shape: []int{16}, Offset: 3104, Alias: 1},
	}}
}

func TestManifestsAreChecked(t *testing.T) {
	good := aManifest()
	require.NoError(t, good.Validate())
	for name, row := range map[string]struct {
		change func(m *handles.Manifest)
		says   string
	}{
		"a negative size":      {func(m *handles.Manifest) { m.Bytes = -1 }, "-1 bytes"},
		"a size beyond any":    {func(m *handles.Manifest) { m.Bytes = math.MaxInt }, "bytes of memory"},
		"no name":              {func(m *handles.Manifest) { m.Tensors[1].Name = "" }, "tensor 1 has a name of 0 bytes"},
		"a long name":          {func(m *handles.Manifest) { m.Tensors[1].Name = strings.Repeat("x", handles.MaxTensorName+1) }, "4097 bytes"},
		"no UTF-8":             {func(m *handles.Manifest) { m.Tensors[1].Name = "\xff" }, "UTF-8"},
		"a name twice":         {func(m *handles.Manifest) { m.Tensors[1].Name = "embed" }, `"embed": the name occurs twice`},
		"no element":           {func(m *handles.Manifest) { m.Tensors[1].Element = handles.NoElement }, "elements of type none"},
		"a record":             {func(m *handles.Manifest) { m.Tensors[1].Element = handles.Record }, "elements of type record"},
		"an unknown element":   {func(m *handles.Manifest) { m.Tensors[1].Element = 99 }, "ElementType(99)"},
		"a negative length":    {func(m *handles.Manifest) { m.Tensors[1].Shape = []int{-1} }, "a shape of [-1]"},
		"many dimensions":      {func(m *handles.Manifest) { m.Tensors[1].Shape = make([]int, handles.MaxTensorDims+1) }, "a shape of"},
		"a negative offset":    {func(m *handles.Manifest) { m.Tensors[0].Offset = -1 }, "from offset -1"},
		"an overlap":           {func(m *handles.Manifest) { m.Tensors[1].Offset = 1023 }, "behind a tensor that ends at 1024"},
		"an alias alone":       {func(m *handles.Manifest) { m.Tensors[5].Alias = 0 }, `"head.tied": it begins at 3072, behind a tensor that ends at 4096`},
		"another alias":        {func(m *handles.Manifest) { m.Tensors[6].Alias = 2 }, `"head.row": it begins at 3104`},
		"an alias behind it":   {func(m *handles.Manifest) { m.Tensors[3].Shape = []int{2045}; m.Tensors[3].Alias = 2 }, "behind a tensor that ends at 3073"},
		"a negative alias":     {func(m *handles.Manifest) { m.Tensors[1].Alias = -1 }, "alias group -1"},
		"an order":             {func(m *handles.Manifest) { m.Tensors[6].Offset = 3071 }, "behind a tensor at 3072"},
		"one stride":           {func(m *handles.Manifest) { m.Tensors[4].Strides = []int{1} }, "strides of [1], of the shape [16 32]"},
		"strides of a scalar":  {func(m *handles.Manifest) { m.Tensors[1].Strides = []int{1} }, "strides of [1]"},
		"a negative stride":    {func(m *handles.Manifest) { m.Tensors[4].Strides = []int{-1, 16} }, "strides of [-1 16]"},
		"strides too far":      {func(m *handles.Manifest) { m.Tensors[4].Strides = []int{2, 16} }, "1054 bytes from offset 3072"},
		"strides that wrap":    {func(m *handles.Manifest) { m.Tensors[4].Strides = []int{math.MaxInt, math.MaxInt} }, "from offset 3072"},
		"a long kind":          {func(m *handles.Manifest) { m.Tensors[3].Kind = strings.Repeat("x", handles.MaxTensorKind+1) }, "a kind of 65 bytes"},
		"a kind of no UTF-8":   {func(m *handles.Manifest) { m.Tensors[3].Kind = "\xff" }, "a kind of"},
		"one byte too many":    {func(m *handles.Manifest) { m.Bytes-- }, "in 4095 bytes"},
		"an offset outside":    {func(m *handles.Manifest) { m.Tensors[6].Offset = math.MaxInt }, "in 4 KiB"},
		"a product that wraps": {func(m *handles.Manifest) { m.Tensors[3].Shape = []int{1 << 32, 1 << 32} }, "in 4 KiB"},
		"many tensors":         {func(m *handles.Manifest) { m.Tensors = make([]handles.Tensor, handles.MaxTensors+1) }, "1048577 tensors"},
	} {
		t.Run(name, func(t *testing.T) {
			m := aManifest()
			row.change(&m)
			err := m.Validate()
			require.ErrorIs(t, err, handles.ErrManifest)
			require.ErrorContains(t, err, row.says)
			require.ErrorContains(t, err, "; ")
			_, err = m.MarshalBinary()
			require.ErrorIs(t, err, handles.ErrManifest, "what is not valid is not written")
		})
	}
}

func TestManifestsTravel(t *testing.T) {
	m := aManifest()
	text, err := m.MarshalBinary()
	require.NoError(t, err)
	var got handles.Manifest
	require.NoError(t, got.UnmarshalBinary(text))
	require.Equal(t, m, got)
	require.Equal(t, m.Identity(), got.Identity())
	require.Equal(t, m.Tensors[1], got.ByName()["scale"])
	for _, bad := range []string{"", "{", "null 1", string(text) + "x", `{"bytes":1,"more":2}`, `{"bytes":-1}`,
		`{"bytes":1,"tensors":[{"name":"x","element":"float31","shape":[1],"offset":0}]}`,
		`{"bytes":8,"tensors":[{"name":"x","element":"float32","shape":[9],"offset":0}]}`} {
		require.ErrorIs(t, got.UnmarshalBinary([]byte(bad)), handles.ErrManifest, bad)
		require.Equal(t, m, got, "nothing has changed")
	}
}

// The identity leaves the contents out, and nothing else. Match names what differs.
func TestManifestsAreCompared(t *testing.T) {
	m := aManifest()
	same := aManifest()
	same.Tensors[0].Digest = ""
	require.Equal(t, m.Identity(), same.Identity())
	require.NoError(t, same.Match(&m))
	same.Tensors[1].Shape, same.Tensors[5], same.Tensors[4] = []int{1, 1}, m.Tensors[4], m.Tensors[5]
	m.Tensors[1].Shape, m.Tensors[1].Strides = []int{1, 1}, []int{7, 9}
	same.Tensors[0].Strides, same.Tensors[2].Strides = []int{32, 1}, []int{1, 2, 3}
	require.Equal(t, m.Identity(), same.Identity(), "the order at one offset, and strides that say nothing")
	require.NoError(t, same.Match(&m))
	m.Tensors[1].Shape, m.Tensors[1].Strides = nil, nil
	for name, row := range map[string]struct {
		change func(m *handles.Manifest)
		says   string
	}{
		"bytes":   {func(m *handles.Manifest) { m.Bytes = 8192 }, "bytes 8192 instead of 4096"},
		"name":    {func(m *handles.Manifest) { m.Tensors[1].Name = "bias" }, `no tensor "scale"; a tensor "bias" that is not expected`},
		"element": {func(m *handles.Manifest) { m.Tensors[0].Element = handles.Float16 }, `tensor "embed" has element float16 instead of bfloat16;`},
		"shape":   {func(m *handles.Manifest) { m.Tensors[0].Shape = []int{32, 16} }, `"embed" has shape [32 16] instead of [16 32];`},
		"strides": {func(m *handles.Manifest) { m.Tensors[4].Strides = nil }, `"head" has strides [32 1] instead of [1 16];`},
		"offset":  {func(m *handles.Manifest) { m.Tensors[1].Offset = 1025 }, `"scale" has offset 1025 instead of 1024;`},
		"kind":    {func(m *handles.Manifest) { m.Tensors[4].Kind = "buffer" }, `"head" has kind "buffer" instead of "parameter";`},
		"alias":   {func(m *handles.Manifest) { m.Tensors[4].Alias = 2 }, `"head" has alias group 2 instead of 1;`},
		"fewer":   {func(m *handles.Manifest) { m.Tensors = m.Tensors[:6] }, `no tensor "head.row";`},
		"two": {func(m *handles.Manifest) {
			m.Bytes, m.Tensors[0].Element, m.Tensors[0].Offset = 8192, handles.Float16, 2
		},
			`bytes 8192 instead of 4096; tensor "embed" has element float16 instead of bfloat16, offset 2 instead of 0;`},
		"many": {func(m *handles.Manifest) {
			m.Tensors = nil
			for i := range 5 {
				m.Tensors = append(m.Tensors, handles.Tensor{Name: fmt.Sprint(i), Element: handles.Int8})
			}
		}, `a tensor "0" that is not expected; and 4 more`},
	} {
		t.Run(name, func(t *testing.T) {
			other := aManifest()
			row.change(&other)
			require.NotEqual(t, m.Identity(), other.Identity())
			err := other.Match(&m)
			require.ErrorIs(t, err, handles.ErrMismatch)
			require.ErrorContains(t, err, row.says)
		})
	}
}

func TestElementTypesAreNamedOnce(t *testing.T) {
	sizes := map[handles.ElementType]int{handles.BFloat16: 2, handles.Float16: 2, handles.Float8E4M3: 1, handles.Float8E5M2: 1, handles.Float32: 4, handles.NoElement: 0, handles.Record: 0, 99: 0}
	for e, size := range sizes {
		require.Equal(t, size, e.Size())
	}
	for e := handles.NoElement; e <= handles.Float8E5M2; e++ {
		text, err := e.MarshalText()
		require.NoError(t, err)
		require.Equal(t, e.String(), string(text))
		var got handles.ElementType
		require.NoError(t, got.UnmarshalText(text))
		require.Equal(t, e, got)
	}
	_, err := handles.ElementType(99).MarshalText()
	require.Error(t, err)
	require.Error(t, new(handles.ElementType).UnmarshalText([]byte("Float32")))
}

// Whatever another process sends is refused, or is valid and has one form.
func FuzzManifest(f *testing.F) {
	m := aManifest()
	text, err := m.MarshalBinary()
	require.NoError(f, err)
	f.Add(text)
	f.Add([]byte(`{"bytes":8,"tensors":[{"name":"x","element":"int8","shape":[8],"offset":0}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var m handles.Manifest
		if m.UnmarshalBinary(b) != nil {
			return
		}
		require.NoError(t, m.Validate())
		text, err := m.MarshalBinary()
		require.NoError(t, err)
		require.True(t, json.Valid(text))
		var again handles.Manifest
		require.NoError(t, again.UnmarshalBinary(text))
		require.Equal(t, m.Identity(), again.Identity())
	})
}

// Short text that would become very many values is refused before it does.
func TestManifestsOfManyValues(t *testing.T) {
	many := func(what string, n int) []byte {
		return []byte(`{"bytes":1,"tensors":[` + strings.TrimSuffix(strings.Repeat(what+",", n), ",") + `]}`)
	}
	var m handles.Manifest
	require.ErrorContains(t, m.UnmarshalBinary(many("{}", handles.MaxTensors+1)), "1048577 tensors")
	require.ErrorContains(t, m.UnmarshalBinary(many("1", 17*handles.MaxTensors)), "values")
	one := []byte(`{"bytes":1,"tensors":[{"name":"` + strings.Repeat(`{\"[,`, 800) + `","element":"uint8","shape":[1],"offset":0}]}`)
	require.NoError(t, m.UnmarshalBinary(one), "a name has what it likes")
}

// Every language takes and refuses the same texts, and finds the same identities.
func TestManifestsAreThoseOfTheVectors(t *testing.T) {
	for _, v := range vectors.ReadManifests(t) {
		t.Run(v.Name, func(t *testing.T) {
			var m handles.Manifest
			err := m.UnmarshalBinary([]byte(v.Text))
			if v.Identity == "" {
				require.ErrorIs(t, err, handles.ErrManifest)
				return
			}
			require.NoError(t, err)
			id := m.Identity()
			require.Equal(t, v.Identity, hex.EncodeToString(id[:]))
		})
	}
}
