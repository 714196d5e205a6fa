package load_test

import (
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

func init() { reexec.Register("save for ever", saveForEver) }

// saveForEver saves a file again and again, in turn with one and with two tensors.
func saveForEver(c *reexec.Child) (err error) {
	sys, err := auto.Open(auto.Options{Driver: auto.Software})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	b, err := vmm.NewBuffer(sys.Devices()[0], vmm.BufferOptions{Reserve: 16 * mib})
	if err != nil {
		return err
	}
	s, err := b.Device().NewStream(cuda.StreamOptions{})
	if err != nil {
		return err
	}
	if err := errors.Join(b.Resize(nil, 16*mib), s.Memset(b.Ptr(), 7, 16*mib)); err != nil {
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
