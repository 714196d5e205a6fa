package metrics_test

import (
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/cuvmm/cuvmm/cuda/auto"
	"github.com/cuvmm/cuvmm/metrics"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// A program registers the collector once and serves its metrics.
func ExampleNew() {
	sys, err := auto.Open(auto.Options{Driver: auto.Software})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	registry := prometheus.NewRegistry()
	registry.MustRegister(metrics.New(sys))
	handler := promhttp.HandlerFor(registry, promhttp.HandlerOpts{})

	w := httptest.NewRecorder() // as a scrape does
	handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
	for line := range strings.Lines(w.Body.String()) {
		if strings.HasPrefix(line, "cuvmm_up") || strings.HasPrefix(line, "cuvmm_allocated_bytes") {
			name, labeled, _ := strings.Cut(line, "{") // system and others
			_, value, _ := strings.Cut(labeled, " ")
			fmt.Print(name, " ", value)
		}
	}
	// Output:
	// cuvmm_allocated_bytes 0
	// cuvmm_up 1
}
