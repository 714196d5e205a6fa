package load_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
	"github.com/cuvmm/cuvmm/load"
	"github.com/cuvmm/cuvmm/vmm"
	"github.com/stretchr/testify/require"
)

func init() {
	reexec.Register("save for ever", saveForEver)
	reexec.Register("load for ever", loadForEver)
}

// inChild returns memory of so many bytes, which the software driver has until the process ends.
func inChild(n int) (*vmm.Buffer, *cuda.Stream, error) {
	sys, err := auto.Open(auto.Options{Driver: auto.Software})
	if err != nil {
		return nil, nil, err
	}
	b, err := vmm.NewBuffer(sys.Devices()[0], vmm.BufferOptions{Reserve: n})
	if err != nil {
		return nil, nil, err
	}
	s, err := b.Device().NewStream(cuda.StreamOptions{})
	if err != nil {
		return nil, nil, err
	}
	return b, s, errors.Join(b.Resize(nil, n), s.Memset(b.Ptr(), 7, n))
}

// loadForEver loads a file again and again.
func loadForEver(c *reexec.Child) error {
	b, s, err := inChild(16 * mib)
	if err != nil {
		return err
	}
	m, err := load.OpenSafetensors(c.Args[0])
	if err != nil {
		return err
	}
	l, err := m.Layout(0)
	if err != nil {
		return err
	}
	for i := 0; ; i++ {
		if _, err := m.LoadAll(context.Background(), load.Options{}, s, l, b.Ptr(), b.Len()); err != nil {
			return err
		}
		if i == 0 {
			if err := c.Send(true); err != nil {
				return err
			}
		}
	}
}

// A process that is killed while it loads leaves the file as it was, and nothing anywhere else.
func TestAKilledLoad(t *testing.T) {
	folder, temporary := t.TempDir(), t.TempDir()
	whole := fileOf([]given{some("w", "U8", 12*mib+1)}, nil)
	path := write(t, filepath.Join(folder, "model.safetensors"), whole)
	for i := range 4 {
		c := reexec.Command(t, "load for ever", path)
		c.Env = append(os.Environ(), "TMPDIR="+temporary)
		c.Dir = temporary
		c.Start()
		var loaded bool
		c.Recv(&loaded)
		time.Sleep(time.Duration(5*i) * time.Millisecond)
		c.Kill()
	}
	is, err := os.ReadFile(path)
	require.NoError(t, err)
	require.True(t, bytes.Equal(whole, is))
	for of, most := range map[string]int{folder: 1, temporary: 0} {
		left, err := os.ReadDir(of)
		require.NoError(t, err)
		require.Len(t, left, most)
	}
}

// saveForEver saves a file again and again, in turn with one and with two tensors.
func saveForEver(c *reexec.Child) error {
	b, s, err := inChild(16 * mib)
	if err != nil {
		return err
	}
	one := load.Saving{Name: "w", Element: handles.Uint8, Shape: []int{12*mib + 1}, From: b.Ptr()}
	two := load.Saving{Name: "v", Element: handles.Uint8, Shape: []int{mib}, From: b.Ptr()}
	for i := 0; ; i++ {
		if err := load.SaveSafetensors(context.Background(), load.SaveOptions{Threads: 2}, s, c.Args[0], []load.Saving{one, two}[:1+i%2]...); err != nil {
			return err
		}
		if i == 0 {
			if err := c.Send(true); err != nil {
				return err
			}
		}
	}
}

// Whenever a process that saves is killed, the path has a whole file, and beside it there is at
// most the one that was being written.
func TestAKilledSave(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	for i := range 12 {
		c := reexec.Command(t, "save for ever", path)
		c.Start()
		var saved bool
		c.Recv(&saved)
		time.Sleep(time.Duration(i*i) * time.Millisecond)
		c.Kill()
		m, err := load.OpenSafetensors(path)
		require.NoError(t, err)
		l, err := m.Layout(0)
		require.NoError(t, err)
		for _, x := range l.Tensors {
			require.NotEmpty(t, x.Digest)
		}
		require.NoError(t, gputest.Err(m.Verify(t.Context(), load.Options{}, l)), "its bytes have the digests that it declares")
		require.NoError(t, m.Close())
		left, err := os.ReadDir(filepath.Dir(path))
		require.NoError(t, err)
		require.LessOrEqual(t, len(left), 2)
		for _, f := range left {
			if f.Name() != filepath.Base(path) {
				require.True(t, strings.HasPrefix(f.Name(), ".model.safetensors.") && strings.HasSuffix(f.Name(), ".partial"), f.Name())
				require.NoError(t, os.Remove(filepath.Join(filepath.Dir(path), f.Name())))
			}
		}
	}
}
