// The command cuvmm, in a module of its own: what it comes to need is no
// requirement of the library.
module github.com/cuvmm/cuvmm/cmd/cuvmm

go 1.25.0

require (
	github.com/cuvmm/cuvmm v0.1.0
	github.com/stretchr/testify v1.12.1
	go.uber.org/goleak v1.3.0
	golang.org/x/sync v0.20.0
	golang.org/x/sys v0.43.0
	golang.org/x/term v0.42.0
)

require go.yaml.in/yaml/v3 v3.0.5 // indirect
