//go:build linux

package main

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/test/sampletest"
)

func TestMain(m *testing.M)   { sampletest.Main(m, main) }
func TestSample(t *testing.T) { sampletest.Test(t, sample.Name, sample.Test) }
