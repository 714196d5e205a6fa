package pooltrace

import (
	"bytes"
	"flag"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/cuvmm/cuvmm/internal/tracegen"
	"github.com/cuvmm/cuvmm/vmm/pool/trace"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// run runs a command, as cuvmm does.
func run(args []string, out io.Writer) error {
	f := flag.NewFlagSet(args[0], flag.ContinueOnError)
	f.SetOutput(io.Discard)
	command := map[string]func(*flag.FlagSet) func([]string, io.Writer) error{"replay": Replay, "generate": Generate}[args[0]](f)
	if err := f.Parse(args[1:]); err != nil {
		return err
	}
	return command(f.Args(), out)
}

// fullDisk takes no output.
type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, io.ErrShortWrite }

func TestGenerate(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "new")
	var out bytes.Buffer
	require.NoError(t, run([]string{"generate", "-out", folder, "-only", "uniform", "-seeds", "2", "-divisor", "1024", "-streams", "3"}, &out))
	require.Equal(t, 2, bytes.Count(out.Bytes(), []byte("\n")))
	require.Contains(t, out.String(), "uniform-1")
	want := tracegen.Uniform(tracegen.Config{Seed: 1, Divisor: 1024, Streams: 3})

	b, err := os.ReadFile(filepath.Join(folder, "uniform-1.trace"))
	require.NoError(t, err)
	var got trace.Trace
	require.NoError(t, got.UnmarshalBinary(b))
	require.Equal(t, *want, got)

	require.NoError(t, run([]string{"generate", "-out", folder, "-only", "uniform", "-seeds", "1", "-text"}, &out))
	file, err := os.Open(filepath.Join(folder, "uniform-0.jsonl"))
	require.NoError(t, err)
	defer file.Close()
	read, err := trace.ReadText(file)
	require.NoError(t, err)
	require.Equal(t, tracegen.Uniform(tracegen.Config{}), read)

	require.ErrorIs(t, run([]string{"generate", "-only", "uniform", "-seeds", "1"}, fullDisk{}), io.ErrShortWrite)
	require.ErrorContains(t, run([]string{"generate", "-seeds", "0"}, &out), "-seeds 0: use at least 1")
	require.ErrorContains(t, run([]string{"generate", "-only", "uni"}, &out), "the generators are training, lora, serving, uniform")
	require.ErrorContains(t, run([]string{"generate", "folder"}, &out), "name the folder to write with -out")
	require.Error(t, run([]string{"generate", "-out", filepath.Join(folder, "uniform-0.jsonl"), "-only", "uniform"}, &out))
}
