package vmm_test

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

// What breaks off is no end: a download that is cut short answers
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
func TestReadersAndWritersOfNoBufferAnswer(t *testing.T) {
	for name, do := range map[string]func() error{
		"vmm.Reader.Read":     func() error { _, err := vmm.NewReader(nil).Read(make([]byte, 1)); return err },
		"vmm.Reader.WriteTo":  func() error { _, err := vmm.NewReader(nil).WriteTo(io.Discard); return err },
		"vmm.Writer.Write":    func() error { _, err := vmm.NewWriter(nil).Write(make([]byte, 1)); return err },
		"vmm.Writer.ReadFrom": func() error { _, err := vmm.NewWriter(nil).ReadFrom(new(bytes.Buffer)); return err },
	} {
		err := do()
		require.ErrorIs(t, err, cuda.ErrInvalidArgument)
		require.EqualError(t, err, name+": invalid argument: a nil buffer; make one with NewBuffer")
	}
}
