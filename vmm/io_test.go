package vmm_test

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// What breaks off is no end: a download that is cut short returns
// io.ErrUnexpectedEOF.
func TestWhatIsCutShortIsNotTakenForWhole(t *testing.T) {
	for name, cut := range map[string]error{"unexpected end": io.ErrUnexpectedEOF, "another": errors.New("another")} {
		t.Run(name, func(t *testing.T) {
			_, d := open(t)
			b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib})
			require.NoError(t, err)
			closed(t, b)
			want := pattern(9*mib+5, 1)
			n, err := io.Copy(vmm.NewWriter(b), io.MultiReader(bytes.NewReader(want), iotest.ErrReader(cut)))
			require.ErrorIs(t, err, cut)
			require.EqualValues(t, len(want), n, "what came before is there")
			got, err := io.ReadAll(vmm.NewReader(b))
			require.NoError(t, err)
			require.True(t, bytes.Equal(want, got))
		})
	}
}

// Neither constructor can refuse a nil buffer, so what is made of it does.
func TestReadersAndWritersOfNoBufferReturnErrors(t *testing.T) {
	for name, do := range map[string]func() error{
		"vmm.Reader.Read":     func() error { _, err := vmm.NewReader(nil).Read(make([]byte, 1)); return err },
		"vmm.Reader.WriteTo":  func() error { _, err := vmm.NewReader(nil).WriteTo(io.Discard); return err },
		"vmm.Writer.Write":    func() error { _, err := vmm.NewWriter(nil).Write(make([]byte, 1)); return err },
		"vmm.Writer.ReadFrom": func() error { _, err := vmm.NewWriter(nil).ReadFrom(new(bytes.Buffer)); return err },
	} {
		err := do()
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.EqualError(t, err, name+": invalid argument: a nil buffer; make one with NewBuffer or NewArray")
	}
}

// partial takes at most n bytes of each Write, and returns err.
type partial struct {
	n   int
	err error
	got []byte
}

func (w *partial) Write(p []byte) (int, error) {
	n := min(w.n, len(p))
	w.got = append(w.got, p[:max(n, 0)]...)
	return n, w.err
}

// After an error the Reader goes on where the writer stopped, as the readers of
// the standard library do.
func TestWriteToLosesNothing(t *testing.T) {
	_, d := open(t)
	b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib})
	require.NoError(t, err)
	closed(t, b)
	data := pattern(5*mib, 1)
	require.NoError(t, gputest.Err(b.Append(nil, data)))
	full := errors.New("the disk is full")
	for _, row := range []struct {
		what string
		w    *partial
		want error
	}{
		{"an error in the middle", &partial{n: 10, err: full}, full},
		{"an error at once", &partial{n: 0, err: full}, full},
		{"a short write", &partial{n: 10}, io.ErrShortWrite},
		{"no write at all", &partial{n: 0}, io.ErrShortWrite},
	} {
		t.Run(row.what, func(t *testing.T) {
			r := vmm.NewReader(b)
			n, err := r.WriteTo(row.w)
			require.EqualValues(t, row.w.n, n)
			require.ErrorIs(t, err, row.want)
			rest, err := io.ReadAll(r)
			require.NoError(t, err)
			require.True(t, bytes.Equal(data, append(row.w.got, rest...)))
		})
	}
	t.Run("a writer that lies", func(t *testing.T) {
		for _, n := range []int{-1, 4*mib + 1} {
			n, err := vmm.NewReader(b).WriteTo(lying(n))
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			require.Zero(t, n)
		}
	})
	t.Run("a reader that lies", func(t *testing.T) {
		for _, n := range []int{-1, 4*mib + 1} {
			n, err := vmm.NewWriter(b).ReadFrom(lying(n))
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			require.Zero(t, n)
		}
		require.Equal(t, len(data), b.Len())
	})
	t.Run("a reader without progress", func(t *testing.T) {
		_, err := vmm.NewWriter(b).ReadFrom(lying(0))
		require.ErrorIs(t, err, io.ErrNoProgress)
	})
}

// lying returns itself from every Read and Write, whatever it was given.
type lying int

func (n lying) Read([]byte) (int, error)  { return int(n), nil }
func (n lying) Write([]byte) (int, error) { return int(n), nil }

// The contracts of io, as testing/iotest checks them.
func TestTheContractsOfIO(t *testing.T) {
	_, d := open(t)
	for _, size := range []int{0, 1, 500, 4 * mib, 4*mib + 1} {
		b, err := vmm.NewBuffer(d, vmm.BufferOptions{Reserve: 64 * mib})
		require.NoError(t, err)
		data := pattern(size, size)
		hows := []func(io.Reader) io.Reader{iotest.DataErrReader, iotest.HalfReader}
		small := size <= 500 // in tiny pieces, of which each is a copy
		if small {
			hows = append(hows, iotest.OneByteReader)
		}
		for _, how := range hows {
			require.NoError(t, b.Resize(nil, 0))
			n, err := io.Copy(vmm.NewWriter(b), how(bytes.NewReader(data)))
			require.NoError(t, err)
			require.EqualValues(t, size, n)
			if small {
				require.NoError(t, iotest.TestReader(vmm.NewReader(b), data))
			}
			var out bytes.Buffer
			n, err = vmm.NewReader(b).WriteTo(&out)
			require.NoError(t, err)
			require.EqualValues(t, size, n)
			require.True(t, bytes.Equal(data, out.Bytes()))
		}
		if size > 1 { // the second Read fails
			_, err = vmm.NewWriter(b).ReadFrom(iotest.TimeoutReader(iotest.HalfReader(bytes.NewReader(data))))
			require.ErrorIs(t, err, iotest.ErrTimeout)
		}
		require.NoError(t, b.Close())
	}
}
