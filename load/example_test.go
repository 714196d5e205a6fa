package load_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/load"
	"github.com/cuvmm/cuvmm/vmm"
)

func fatal(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// A model is saved from GPU memory, and loaded into other memory: first as a whole, then what a
// rank of two needs of one tensor.
func ExampleModel() {
	sys, err := auto.Open(auto.Options{})
	fatal(err)
	defer sys.Close()
	dev, err := sys.Device(0)
	fatal(err)
	stream, err := dev.NewStream(cuda.StreamOptions{})
	fatal(err)
	defer stream.Close()
	ctx := context.Background()
	folder, err := os.MkdirTemp("", "load")
	fatal(err)
	defer os.RemoveAll(folder)
	path := filepath.Join(folder, "model.safetensors")

	trained, err := vmm.NewArray[float32](dev, vmm.BufferOptions{})
	fatal(err)
	defer trained.Close()
	_, err = trained.Append(stream, []float32{1, 2, 3, 4, 5, 6, 7, 8})
	fatal(err)
	fatal(load.SaveSafetensors(ctx, load.SaveOptions{Metadata: map[string]string{"format": "pt"}}, stream, path,
		load.Saving{Name: "w", Element: handles.Float32, Shape: []int{2, 3}, From: trained.Ptr()},
		load.Saving{Name: "b", Element: handles.Float32, Shape: []int{2}, From: trained.Ptr() + 24}))

	m, err := load.OpenSafetensors(path)
	fatal(err)
	defer m.Close()
	show := func(t load.Tensor) { fmt.Println(t.Name, t.Element, t.Shape, filepath.Base(t.File)) }
	for _, t := range m.Tensors() {
		show(t)
	}
	layout, err := m.Layout(0)
	fatal(err)
	weights, err := vmm.NewBuffer(dev, vmm.BufferOptions{Reserve: layout.Bytes})
	fatal(err)
	defer weights.Close()
	fatal(weights.Resize(nil, layout.Bytes))
	manifest, err := m.LoadAll(ctx, load.Options{Reading: load.PageCache, Progress: func(p load.Progress) {
		fmt.Println(p.Done, "of", p.Total, "bytes")
	}}, stream, layout, weights.Ptr(), weights.Len())
	fatal(err)
	fmt.Println("w is at", manifest.ByName()["w"].Offset, "with", manifest.ByName()["w"].Digest)

	var second load.Part
	second, err = m.Part("w")
	fatal(err)
	second, err = second.Shard(0, 1, 2) // the second of two rows
	fatal(err)
	row, err := vmm.NewArray[float32](dev, vmm.BufferOptions{})
	fatal(err)
	defer row.Close()
	fatal(row.Resize(nil, second.Size()/4))
	_, err = m.Load(ctx, load.Options{}, stream, second.To(row.Ptr(), second.Size()))
	fatal(err)
	values := make([]float32, row.Len())
	fatal(row.All().CopyTo(stream, values))
	fmt.Println(values)
	// Output:
	// b float32 [2] model.safetensors
	// w float32 [2 3] model.safetensors
	// 280 of 280 bytes
	// w is at 256 with crc32c:805104b9
	// [4 5 6]
}

// A whole model in one range of memory.
func ExampleModel_LoadAll() {
	sys, err := auto.Open(auto.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	dev, err := sys.Device(0)
	if err != nil {
		log.Fatal(err)
	}
	stream, err := dev.NewStream(cuda.StreamOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer stream.Close()
	ctx := context.Background()
	defer inModelsFolder(`{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, "12345678")()

	m, err := load.OpenSafetensors("model.safetensors") // or a folder with an index
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	layout, err := m.Layout(0)
	if err != nil {
		log.Fatal(err)
	}
	memory, err := vmm.NewBuffer(dev, vmm.BufferOptions{Reserve: layout.Bytes})
	if err != nil {
		log.Fatal(err)
	}
	defer memory.Close()
	if err := memory.Resize(nil, layout.Bytes); err != nil {
		log.Fatal(err)
	}
	manifest, err := m.LoadAll(ctx, load.Options{}, stream, layout, memory.Ptr(), memory.Len())
	if err != nil {
		log.Fatal(err)
	}
	for _, t := range manifest.Tensors {
		fmt.Println(t.Name, t.Element, t.Shape, t.Offset, t.Digest)
	}
	// Output:
	// w float32 [2] 0 crc32c:6087809a
}

// inModelsFolder makes a folder with a model the working folder, and returns the way back.
func inModelsFolder(header, data string) (back func()) {
	before, err := os.Getwd()
	fatal(err)
	folder, err := os.MkdirTemp("", "load")
	fatal(err)
	fatal(os.WriteFile(filepath.Join(folder, "model.safetensors"), append([]byte{byte(len(header)), 0, 0, 0, 0, 0, 0, 0}, header+data...), 0o600))
	fatal(os.Chdir(folder))
	return func() {
		fatal(os.Chdir(before))
		fatal(os.RemoveAll(folder))
	}
}

// An error names the file, and the tensor in it.
func ExampleError() {
	folder, err := os.MkdirTemp("", "load")
	fatal(err)
	defer os.RemoveAll(folder)
	path := filepath.Join(folder, "cut.safetensors")
	const header = `{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`
	fatal(os.WriteFile(path, append([]byte{byte(len(header)), 0, 0, 0, 0, 0, 0, 0}, header+"1234567"...), 0o600))

	_, err = load.OpenSafetensors(path)
	var e *load.Error
	if errors.As(err, &e) {
		fmt.Println(errors.Is(err, load.ErrFormat), filepath.Base(e.File), e.Tensor)
		fmt.Println(e.Asked)
	}
	// Output:
	// true cut.safetensors w
	// it ends at 8 of 7 bytes of data: the file was cut short
}
