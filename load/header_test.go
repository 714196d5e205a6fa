package load_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/load"
	"github.com/stretchr/testify/require"
)

func withData(header string, data int) []byte {
	return append(withLength([]byte(header)), make([]byte, data)...)
}

// Each row is a file that no correct writer makes, with what the error says. The tensor that
// it names is x, if any.
func TestHeadersAreChecked(t *testing.T) {
	const x = `{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`
	with := func(from, to string) string { return strings.Replace(x, from, to, 1) }
	for name, row := range map[string]struct {
		file   []byte
		tensor string
		says   string
	}{
		"nothing":                        {nil, "", "0 bytes"},
		"less than a length":             {make([]byte, 7), "", "7 bytes"},
		"a header beyond the file":       {binary.LittleEndian.AppendUint64(nil, 9), "", "a header of 9 bytes in a file of 8 bytes"},
		"a header that is cut":           {binary.LittleEndian.AppendUint64(nil, 4), "", "a header of 4 bytes in a file of 8 bytes"},
		"a header beyond the format":     {binary.LittleEndian.AppendUint64(nil, 100_000_001), "", "100000001 bytes, where the format allows 100000000"},
		"a length that wraps":            {append(binary.LittleEndian.AppendUint64(nil, 1<<63+8), make([]byte, 64)...), "", "the format allows"},
		"an empty header":                {withData("", 0), "", "begin with {"},
		"spaces first":                   {withData(" {}", 0), "", "begin with {"},
		"no object":                      {withData("[]", 0), "", "begin with {"},
		"cut off":                        {withData(x[:30], 8), "", "byte "},
		"something behind":               {withData(x+"{", 8), "", "behind the end"},
		"a comma too many":               {withData(strings.TrimSuffix(x, "}")+",}", 8), "", "byte "},
		"a zero byte":                    {withData(with(":", ":\x00"), 8), "", "byte "},
		"no UTF-8":                       {withData(with("x", "\xff"), 8), "", "not UTF-8"},
		"a bad escape":                   {withData(with("x", `\x`), 8), "", "an escape"},
		"a control character":            {withData(with("x", "\n"), 8), "", "a control character"},
		"an escaped end":                 {withData(`{"x\`, 8), "", "without an end"},
		"no name":                        {withData(with("x", ""), 8), "", "a tensor with a name of 0 bytes"},
		"a long name":                    {withData(with("x", strings.Repeat("x", handles.MaxTensorName+1)), 8), "", "a name of 4097 bytes"},
		"a name twice":                   {withData(`{"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}`, 0), "", `"x" occurs twice`},
		"a name twice by an escape":      {withData(`{"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"\u0078":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}`, 0), "", `"x" occurs twice`},
		"a field twice":                  {withData(with(`"shape":[2]`, `"shape":[2],"shape":[2]`), 8), "", "occurs twice"},
		"another field":                  {withData(with(`"shape":[2]`, `"shape":[2],"device":0`), 8), "", "device"},
		"a field too few":                {withData(with(`,"shape":[2]`, ""), 8), "x", "lacks"},
		"an unknown type":                {withData(with("F32", "F31"), 8), "x", `dtype "F31"`},
		"a type that is a number":        {withData(with(`"F32"`, "32"), 8), "", "byte "},
		"a shape that is a number":       {withData(with("[2]", "2"), 8), "", "byte "},
		"a negative dimension":           {withData(with("[2]", "[-2]"), 8), "", "integer"},
		"a fraction":                     {withData(with("[2]", "[2.0]"), 8), "", "byte "},
		"an exponent":                    {withData(with("[2]", "[2e0]"), 8), "", "byte "},
		"leading zeros":                  {withData(with("[2]", "[02]"), 8), "", "leading zeros"},
		"a dimension beyond 64 bits":     {withData(with("[2]", "[18446744073709551618]"), 8), "", "beyond 64 bits"},
		"a product that wraps to 8":      {withData(with("[2]", "[4611686018427387905,2]"), 8), "x", "for a shape of"},
		"a product that wraps to 0":      {withData(with("[2]", "[4294967296,4294967296]"), 8), "x", "for a shape of"},
		"many dimensions":                {withData(with("[2]", "[2"+strings.Repeat(",1", 64)+"]"), 8), "x", "65 dimensions"},
		"offsets of three":               {withData(with("[0,8]", "[0,8,8]"), 8), "x", "begin and end"},
		"offsets of one":                 {withData(with("[0,8]", "[8]"), 8), "x", "begin and end"},
		"an end before the begin":        {withData(with("[0,8]", "[8,0]"), 8), "x", "begin and end"},
		"another size":                   {withData(with("[0,8]", "[0,7]"), 8), "x", "7 bytes"},
		"the largest offsets":            {withData(with("[0,8]", "[9223372036854775799,9223372036854775807]"), 8), "x", "behind a gap"},
		"data that is short":             {withData(x, 7), "x", "cut short"},
		"no data":                        {withData(x, 0), "x", "cut short"},
		"data that is long":              {withData(x, 9), "", "1 byte behind the last tensor"},
		"a gap":                          {withData(`{"x":{"dtype":"F32","shape":[2],"data_offsets":[12,20]},"y":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 20), "x", "behind a gap from 8"},
		"a gap at the front":             {withData(with("[0,8]", "[4,12]"), 12), "x", "behind a gap from 0"},
		"an overlap":                     {withData(`{"x":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},"y":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, 12), "x", `within tensor "y"`},
		"metadata of numbers":            {withData(`{"__metadata__":{"a":1}}`, 0), "", "byte "},
		"metadata in depth":              {withData(`{"__metadata__":`+strings.Repeat("[", 1<<20), 0), "", "byte "},
		"digests of another count":       {withData(`{"__metadata__":{"cuvmm.crc32c":"00000000"}}`, 0), "", "8 bytes for 0 tensors"},
		"digests that are none":          {withData(`{"__metadata__":{"cuvmm.crc32c":"0000000G"},"x":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}`, 4), "", "cuvmm.crc32c"},
		"an empty tensor beyond the end": {withData(`{"x":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}}`, 0), "x", "behind a gap"},
	} {
		t.Run(name, func(t *testing.T) {
			path := write(t, "bad.safetensors", row.file)
			m, err := load.OpenSafetensors(path)
			require.Nil(t, m)
			require.True(t, errors.Is(err, load.ErrFormat) || errors.Is(err, load.ErrElement), "%v", err)
			var e *load.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, path, e.File)
			require.Equal(t, row.tensor, e.Tensor)
			require.Contains(t, e.Asked, row.says)
			require.NotEmpty(t, e.Hint)
		})
	}
}

// What the format permits is read: spaces, escapes, any order, no tensors.
func TestHeadersThatAreRight(t *testing.T) {
	for name, file := range map[string][]byte{
		"none":       withData("{}", 0),
		"padded":     withData("{}       ", 0),
		"metadata":   withData(`{"__metadata__":{}}`, 0),
		"with space": withData("{ \"a\\u0062\\n\" :\t{ \"shape\" : [ 1 , 2 ] ,\r\n \"data_offsets\":[0,2],\"dtype\":\"U8\"} } ", 2),
		"no shape":   withData(`{"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}`, 1),
		"empty":      withData(`{"x":{"dtype":"F64","shape":[9223372036854775807,0,9223372036854775807],"data_offsets":[0,0]}}`, 0),
		"order":      withData(`{"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},"z":{"dtype":"U8","shape":[0],"data_offsets":[1,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 2),
	} {
		t.Run(name, func(t *testing.T) {
			m := open(t, write(t, "good.safetensors", file))
			_, err := m.Layout(0)
			require.NoError(t, err)
		})
	}
}

// The largest header that the format allows is read.
func TestAHeaderOfTheLargestSize(t *testing.T) {
	const most, count = 100_000_000, 10_000
	var b bytes.Buffer
	b.WriteString("{")
	for i := range count {
		fmt.Fprintf(&b, `"model.layers.%d.mlp.experts.w%0100d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]},`, i, i, i, i+1)
	}
	b.WriteString(`"last":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}`)
	b.WriteString(strings.Repeat(" ", most-b.Len()))
	m := open(t, write(t, "large.safetensors", append(withLength(b.Bytes()), make([]byte, count)...)))
	require.Len(t, m.Tensors(), count+1)
}

func TestFolders(t *testing.T) {
	a, b, c := some("a", "F32", 100), some("b", "BF16", 33, 3), some("c", "U8", 5)
	folder := func(t *testing.T, index string, files map[string][]byte) string {
		dir := t.TempDir()
		for name, f := range files {
			write(t, filepath.Join(dir, name), f)
		}
		if index != "" {
			write(t, filepath.Join(dir, "model.safetensors.index.json"), []byte(index))
		}
		return dir
	}
	const places = `{"metadata":{"total_size":[1,{"x":2.5}]},"weight_map":{"a":"1.safetensors","b":"2.safetensors","c":"1.safetensors"}}`
	both := map[string][]byte{"1.safetensors": fileOf([]given{c, a}, map[string]string{"format": "pt", "k": "1"}), "2.safetensors": fileOf([]given{b}, map[string]string{"k": "2"})}

	dir := folder(t, places, both)
	m := open(t, dir)
	var names []string
	for _, x := range m.Tensors() {
		names = append(names, x.Name+" "+filepath.Base(x.File))
	}
	require.Equal(t, []string{"c 1.safetensors", "a 1.safetensors", "b 2.safetensors"}, names)
	require.Equal(t, map[string]string{"format": "pt", "k": "1"}, m.Metadata())

	open(t, folder(t, "", map[string][]byte{"model.safetensors": fileOf([]given{a}, nil)}))
	// A tensor that another file has too is the one that the index says.
	m = open(t, folder(t, `{"weight_map":{"a":"2"}}`, map[string][]byte{"2": fileOf([]given{a, b}, nil)}))
	require.Len(t, m.Tensors(), 1)

	for name, row := range map[string]struct {
		index string
		files map[string][]byte
		is    error
		says  string
	}{
		"without an index":         {"", both, load.ErrFormat, "fetch the index too"},
		"empty":                    {"", nil, load.ErrFormat, "fetch the index too"},
		"an index that is none":    {"{", both, load.ErrFormat, "model.safetensors.index.json"},
		"an index of nothing":      {"{}", both, load.ErrFormat, "weight_map"},
		"a file that is missing":   {strings.Replace(places, "2.s", "3.s", 1), both, os.ErrNotExist, "3.safetensors"},
		"a tensor that is missing": {strings.Replace(places, `"b"`, `"d"`, 1), both, load.ErrFormat, `tensor "d"`},
		"a file outside":           {strings.Replace(places, "2.s", "../2.s", 1), both, load.ErrFormat, "not a name in the folder"},
		"an absolute file":         {strings.Replace(places, "2.safetensors", "/etc/passwd", 1), both, load.ErrFormat, "not a name in the folder"},
		"a folder as a file":       {strings.Replace(places, "2.safetensors", "..", 1), both, load.ErrFormat, "not a name in the folder"},
		"a file that is bad":       {places, map[string][]byte{"1.safetensors": both["1.safetensors"], "2.safetensors": both["2.safetensors"][:100]}, load.ErrFormat, "2.safetensors"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := load.OpenSafetensors(folder(t, row.index, row.files))
			require.ErrorIs(t, err, row.is)
			require.ErrorContains(t, err, row.says)
			require.ErrorContains(t, err, "; ")
		})
	}
}

// Whatever the bytes, a file is refused with an error of this package, or its tensors lie in
// it, one behind the other.
func FuzzOpen(f *testing.F) {
	f.Add(fileOf(assorted()[1:2], map[string]string{"a": "b"}))
	f.Add(fileOf([]given{some("w", "BF16", 3, 2), some("", "U8", 1)}, nil))
	f.Add(withData(`{"__metadata__":{"cuvmm.crc32c":"00000000"},"x":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}`, 4))
	f.Add(withData(`{"x\u0041":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[0,0]}}`, 0))
	path := filepath.Join(f.TempDir(), "fuzzed")
	f.Fuzz(func(t *testing.T, b []byte) {
		require.NoError(t, os.WriteFile(path, b, 0o600))
		m, err := load.OpenSafetensors(path)
		if err != nil {
			var e *load.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, path, e.File)
			return
		}
		defer m.Close()
		end := 8 + int(binary.LittleEndian.Uint64(b))
		require.True(t, json.Valid(b[8:end]), "other readers take it")
		for _, x := range m.Tensors() {
			require.Equal(t, end, x.Offset)
			end += x.Size()
		}
		require.Equal(t, len(b), end)
		l, err := m.Layout(0)
		require.NoError(t, err)
		require.NoError(t, l.Validate())
	})
}

// Whatever the index says, a folder is refused with an error of this package, or the tensors are among
// those of the folder's files.
func FuzzIndex(f *testing.F) {
	f.Add([]byte(`{"metadata":{"total_size":[1,{"x":2.5}]},"weight_map":{"a":"1.safetensors","b":"2"}}`))
	f.Add([]byte(`{"weight_map":{"a":"../1.safetensors"}}`))
	f.Add([]byte(`{"weight_map":{"\u0061":"2","a":"2"},"weight_map":{}}`))
	f.Add([]byte(`{"weight_map":{"a":"model.safetensors.index.json"}}`))
	dir := f.TempDir()
	files := map[string][]given{"1.safetensors": {some("a", "F32", 2), some("c", "U8", 3)}, "2": {some("b", "BF16", 3, 2), some("a", "U8")}}
	for name, tensors := range files {
		write(f, filepath.Join(dir, name), fileOf(tensors, nil))
	}
	index := filepath.Join(dir, "model.safetensors.index.json")
	f.Fuzz(func(t *testing.T, b []byte) {
		require.NoError(t, os.WriteFile(index, b, 0o600))
		m, err := load.OpenSafetensors(dir)
		if err != nil {
			var e *load.Error
			require.ErrorAs(t, err, &e)
			require.True(t, strings.HasPrefix(e.File, dir), e.File)
			return
		}
		defer m.Close()
		require.True(t, json.Valid(b))
		for _, x := range m.Tensors() {
			require.Equal(t, dir, filepath.Dir(x.File))
			require.True(t, slices.ContainsFunc(files[filepath.Base(x.File)], func(g given) bool { return g.name == x.Name && len(g.bytes) == x.Size() }), "%+v", x)
		}
		l, err := m.Layout(0)
		require.NoError(t, err)
		require.NoError(t, l.Validate())
	})
}
