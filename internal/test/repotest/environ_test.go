package repotest

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Programs, and code that only tests use, read their environment themselves.
var environFree = []string{"cmd", "samples", "tools", "internal/environ"}

var environCall = regexp.MustCompile(`\b(os\.(Getenv|LookupEnv|Environ|ExpandEnv|TempDir|Getuid|Getgid|UserHomeDir|UserCacheDir|UserConfigDir)|(syscall|unix)\.(Getenv|Environ|Getuid|Getgid))\b|\bos\.(MkdirTemp|CreateTemp)\(""`)

// checkEnviron: a program that runs with more rights than its caller takes nothing of its
// caller's environment, and is not the caller's user. internal/environ knows.
func checkEnviron(tr *tree) []string {
	var complaints []string
	for _, g := range tr.gos {
		free := slices.ContainsFunc(environFree, func(dir string) bool { return g.dir == dir || strings.HasPrefix(g.dir, dir+"/") })
		if g.test || free || strings.HasPrefix(g.dir, testCode) {
			continue
		}
		for i, line := range strings.Split(tr.read(g.path), "\n") {
			code, _, _ := strings.Cut(line, "//")
			if call := environCall.FindString(code); call != "" {
				complaints = append(complaints, fmt.Sprintf("%s:%d: %s: use internal/environ, or os.Geteuid: a program may run with more rights than its caller", g.path, i+1, strings.TrimSuffix(call, `(""`)))
			}
		}
	}
	return complaints
}

func TestEnviron(t *testing.T) {
	wantComplaints(t, checkEnviron(given(t,
		"vmm/a.go", "package vmm\n\nimport \"os\"\n\nvar a = os.Getenv(\"A\") // os.Getenv\n",
		"vmm/b.go", "package vmm\n\nimport \"os\"\n\nvar b, _ = os.MkdirTemp(\"\", \"b\")\n",
		"vmm/a_test.go", "package vmm\n\nimport \"os\"\n\nvar a = os.Getenv(\"A\")\n",
		"samples/s/main.go", "package main\n\nimport \"os\"\n\nvar a = os.TempDir()\n",
		"internal/test/needs/a.go", "package needs\n\nimport \"os\"\n\nvar a = os.Getenv(\"A\")\n",
		"internal/environ/a.go", "package environ\n\nimport \"os\"\n\nvar a = os.Getenv(\"A\")\n",
		"handles/a.go", "package handles\n\nimport \"os\"\n\nvar a, b = os.Geteuid(), os.Getuid()\n",
	)), "handles/a.go:5: os.Getuid", "vmm/a.go:5: os.Getenv: use internal/environ", "vmm/b.go:5: os.MkdirTemp")
}
