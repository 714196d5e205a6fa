package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/user"
	"regexp"
	"runtime"
	"strings"
)

// reported are the prefixes of the environment variables that a report shows. Others may
// hold secrets.
var reported = []string{"CUDA_", "CUVMM_", "NCCL_", "NVIDIA_", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "GOMEMLIMIT", "GODEBUG"}

// report returns all that is known of the machine as JSON, without what identifies its
// user.
func report(findings []finding, h host, driver string) string {
	about := struct {
		Report   string            `json:"report"`
		Version  string            `json:"version"`
		Go       string            `json:"go"`
		System   string            `json:"system"`
		Kernel   string            `json:"kernel,omitempty"`
		Module   string            `json:"kernel_module,omitempty"`
		Settings map[string]string `json:"settings"`
		Findings []finding         `json:"findings"`
		Info     *driverInfo       `json:"info,omitempty"`
		Error    string            `json:"error,omitempty"`
	}{
		Report: "cuvmm doctor", Version: version(), Go: runtime.Version(), System: runtime.GOOS + "/" + runtime.GOARCH,
		Kernel: h.text("proc/version"), Module: h.text("proc/driver/nvidia/version"), Settings: map[string]string{}, Findings: findings,
	}
	for _, setting := range h.environ() {
		name, value, _ := strings.Cut(setting, "=")
		if secrets.MatchString(name) {
			value = "HIDDEN"
		}
		for _, begin := range reported {
			if strings.HasPrefix(name, begin) {
				about.Settings[name] = value
			}
		}
	}
	if info, err := describeAll(h, driver); err != nil {
		about.Error = err.Error()
	} else {
		about.Info = &info
	}
	var text strings.Builder
	e := json.NewEncoder(&text)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(about); err != nil {
		panic(err) // plain data has a form in JSON
	}
	return anonymous(text.String())
}

var (
	uuids   = regexp.MustCompile(`((?:GPU|MIG)-[0-9a-f]{4})[0-9a-f]{4}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}`)
	secrets = regexp.MustCompile(`(?i)token|secret|passw|key|credential`)
)

// anonymous replaces what identifies the user, the host or a GPU.
func anonymous(text string) string {
	replace := func(what, by string) {
		if what != "" {
			text = regexp.MustCompile(`\b`+regexp.QuoteMeta(what)+`\b`).ReplaceAllString(text, by)
		}
	}
	if home, err := os.UserHomeDir(); err == nil && home != "/" {
		text = strings.ReplaceAll(text, home+"/", "~/")
	}
	if host, err := os.Hostname(); err == nil && host != "localhost" {
		replace(host, "HOST")
	}
	if u, err := user.Current(); err == nil && u.Username != "root" {
		replace(u.Username, "USER")
	}
	return uuids.ReplaceAllString(text, "$1…")
}

var errNoCommand = errors.New("it is not installed")

// probe runs a vendor's program that changes nothing, and returns its output.
func (h host) probe(name string, args ...string) (string, error) {
	if h.command == nil {
		return "", errNoCommand
	}
	out, err := h.command(name, args...)
	if err != nil {
		return "", fmt.Errorf("%s: %w", name, err)
	}
	return out, nil
}
