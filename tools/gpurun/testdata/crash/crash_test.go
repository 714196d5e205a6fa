// Package crash ends outside of any test's control.
package crash

import (
	"os"
	"testing"
)

func TestCrashes(t *testing.T) {
	switch os.Getenv("CRASH_BY") {
	case "hanging":
		select {}
	case "leaking": // see TestMain
	default:
		done := make(chan bool)
		go func() { panic("unrecovered") }()
		<-done
	}
}

func TestMain(m *testing.M) {
	if os.Getenv("CRASH_BY") == "silence" {
		os.Exit(0)
	}
	code := m.Run()
	if os.Getenv("CRASH_BY") == "leaking" {
		os.Stderr.WriteString("one reservation was never closed\n")
		code = 1
	}
	os.Exit(code)
}

func BenchmarkFails(b *testing.B) {
	for _, name := range []string{"small", "large"} {
		b.Run(name, func(b *testing.B) {
			if os.Getenv("CRASH_BY") == "benchmark" {
				b.Fatal("the chunk is too " + name)
			}
			b.Skip("only when it is to fail")
		})
	}
}
