package core

import (
	"context"
	"log/slog"
	"runtime/debug"
)

// Hook runs a function of a user on a goroutine of the library, where a panic would end
// the process. It is logged instead: to slog's default where the log discards it, so
// that it is never lost.
func Hook(log *slog.Logger, what string, f func()) {
	defer func() {
		if p := recover(); p != nil {
			if !log.Enabled(context.Background(), slog.LevelError) {
				log = slog.Default()
			}
			log.Error("cuvmm: a function of the user panicked", "function", what, "panic", p, "stack", string(debug.Stack()))
		}
	}()
	f()
}
