package core

import (
	"context"
	"log/slog"
	"runtime/debug"
)

// Hook runs a function of a user and waits for it. The function has a goroutine of its
// own, because a panic would end the process, and runtime.Goexit, which a test's FailNow
// calls, a goroutine of the library. Both are logged, to slog's default if the log discards
// them, so that neither is lost.
func Hook(log *slog.Logger, what string, f func()) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		returned := false
		defer func() {
			if returned {
				return
			}
			if !log.Enabled(context.Background(), slog.LevelError) {
				log = slog.Default()
			}
			if p := recover(); p != nil {
				log.Error("cuvmm: a function of the user panicked", "function", what, "panic", p, "stack", string(debug.Stack()))
			} else {
				log.Error("cuvmm: a function of the user ended its goroutine", "function", what, "hint", "return instead of calling runtime.Goexit or a test's FailNow")
			}
		}()
		f()
		returned = true
	}()
	<-ended
}
