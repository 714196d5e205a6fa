// Package mixed has a test of every outcome.
package mixed

import (
	"fmt"
	"os"
	"testing"
)

func TestPasses(t *testing.T) {
	for _, name := range []string{"one", "two"} {
		t.Run(name, func(t *testing.T) { t.Parallel() })
	}
}

func TestReadsItsFolder(t *testing.T) {
	if _, err := os.ReadFile("testdata/here"); err != nil {
		t.Fatal(err)
	}
}

func TestSkips(t *testing.T) {
	t.Log("something before")
	t.Skip("there is no fabric here")
}

func TestFails(t *testing.T) {
	t.Run("inner", func(t *testing.T) {
		fmt.Print("no newline after this ")
		t.Errorf("got %d, want %d", 1, 2)
	})
}

func TestNeedsGPU(t *testing.T) {
	if os.Getenv("CUVMM_REQUIRE_GPU") == "" {
		t.Skip("no GPU is required")
	}
	t.Fatal("a GPU is required and there is none")
}

func BenchmarkAdds(b *testing.B) {
	n := 0
	for b.Loop() {
		n++
	}
	b.ReportMetric(float64(n), "chunks/op")
}

func BenchmarkSkips(b *testing.B) { b.Skip("no second device") }
