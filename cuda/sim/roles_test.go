package sim

import "runtime"

var roles = map[string]func() error{}

const canPlace = runtime.GOOS == "linux" && (runtime.GOARCH == "amd64" || runtime.GOARCH == "arm64")
