package trace_test

import (
	"bytes"
	"compress/gzip"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"github.com/stretchr/testify/require"
)

func zipped(t testing.TB, b []byte) []byte {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, err := w.Write(b)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return out.Bytes()
}

func TestRead(t *testing.T) {
	binary, err := small().MarshalBinary()
	require.NoError(t, err)
	var text bytes.Buffer
	require.NoError(t, small().WriteText(&text))
	list := []byte(" [[7, 1000],\n[8, 20], [7,0], [7 , 5]]\n")
	fromList := &trace.Trace{Name: "named", Streams: 1, Tags: []string{""}, Ops: []trace.Op{
		{Kind: trace.Alloc, Bytes: 1000},
		{Kind: trace.Alloc, ID: 1, Bytes: 20},
		{Kind: trace.Free},
		{Kind: trace.Alloc, ID: 2, Bytes: 5},
	}}
	for _, c := range []struct {
		name string
		file []byte
		want *trace.Trace
	}{
		{"binary", binary, small()},
		{"text", text.Bytes(), small()},
		{"list", list, fromList},
		{"an empty list", []byte("[]"), &trace.Trace{Name: "named", Streams: 1, Tags: []string{""}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, file := range [][]byte{c.file, zipped(t, c.file)} {
				got, err := trace.Read(bytes.NewReader(file), "named")
				require.NoError(t, err)
				require.Equal(t, c.want, got)
			}
		})
	}
}

func TestReadRefuses(t *testing.T) {
	for _, c := range []struct{ name, file, want string }{
		{"nothing", "\n", "the file is empty"},
		{"something else", "<html>", `begins with "<html>": use the binary form`},
		{"a pickle", "\x80\x04\x95", "convert a snapshot of PyTorch's memory with scripts/pool-peers.py convert"},
		{"cut off compression", string(zipped(t, []byte("[[1, 2]]"))[:14]), "decompressing it: unexpected EOF"},
		{"a cut list", "[[0, 5],\n[1, 6]", "line 2, operation 2 (byte 15): the list ends where ',' is expected: the file is cut off"},
		{"a cut entry", "[[0, 5], [1", "operation 1 (byte 11): the list ends where ',' is expected"},
		{"no comma", "[[0, 5] [1, 6]]", `operation 1 (byte 8): '[' where ',' is expected: each entry is [block, bytes]`},
		{"a comma at the end", "[[0, 5],]", "operation 1 (byte 8): ']' where '[' is expected"},
		{"an entry of three", "[[0, 5, 1]]", "',' where ']' is expected: each entry is [block, bytes]"},
		{"a negative size", "[[0, -5]]", `operation 0 (byte 5): "-5]]" is not a number: use unsigned integers`},
		{"a fraction", "[[0, 5.5]]", "fraction or an exponent"},
		{"an exponent", "[[0, 5e3]]", "fraction or an exponent"},
		{"text", `[["a", 5]]`, "is not a number"},
		{"beyond 64 bits", "[[0, 18446744073709551616]]", "too large: use unsigned integers of 64 bits"},
		{"freed twice", "[[0, 5], [0, 0], [0, 0]]", "line 1, operation 2 (byte 23): block 0 is freed, but is not allocated: remove [0, 0]"},
		{"allocated twice", "[[1, 5], [3, 5], [3, 6]]", "operation 2 (byte 23): block 3 is allocated, but lives since operation 1: free it first with [3, 0]"},
		{"too large", "[[0, 140737488355329]]", "block 0 has 140737488355329 bytes, at most 140737488355328 are allowed"},
		{"more after it", "[[0, 5]] [", "'[' after the end of the list: remove it"},
		{"text form", `{"trace":"x"}` + "\n" + `{"op":"free"}`, "line 2"},
		{"binary form", "cuvmmtr\x01", "decoding a trace, at byte 8 of 8"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := trace.Read(strings.NewReader(c.file), "x")
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestReadLimit(t *testing.T) {
	for _, c := range []struct {
		file string
		fits bool
	}{{"12345", true}, {"123456", false}} {
		got, err := trace.ReadAll(strings.NewReader(c.file), 5)
		if c.fits {
			require.NoError(t, err)
			require.Equal(t, c.file, string(got))
		} else {
			require.ErrorContains(t, err, "more than 5 bytes, the most that is read: cut the trace into parts")
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add([]byte("[[0, 5], [1, 6], [0, 0]]"))
	f.Add(zipped(f, []byte("[[0, 5]]")))
	f.Fuzz(func(t *testing.T, b []byte) {
		tr, err := trace.Read(bytes.NewReader(b), "fuzz")
		if err != nil {
			return
		}
		require.NoError(t, tr.Check())
	})
}
