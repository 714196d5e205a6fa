package metrics

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net/http/httptest"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/cuvmm/cuvmm/inspect"
	"github.com/cuvmm/cuvmm/internal/core"
	_ "github.com/cuvmm/cuvmm/internal/test/gputest" // with it, another library captures beside each test
	"github.com/cuvmm/cuvmm/internal/test/needs"
	"github.com/cuvmm/cuvmm/vmm/pool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
)

// scrape returns the text of a scrape.
func scrape(t *testing.T, c prometheus.Collector) string {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	require.NoError(t, r.Register(c))
	w := httptest.NewRecorder()
	promhttp.HandlerFor(r, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError}).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	require.Equal(t, 200, w.Code, w.Body.String())
	return w.Body.String()
}

func TestAScrape(t *testing.T) {
	_, sys := sim.Open(t, sim.Options{Devices: make([]sim.DeviceOptions, 2)})
	d := sys.Devices()[1]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	limit := cuda.NewBudget(2<<30, cuda.BudgetOptions{Name: "scraped"})
	p, err := pool.New(d, pool.Options{Statistics: true, Limit: 1 << 30, Name: "activations", Tag: "llm", Budget: limit})
	require.NoError(t, err)
	b, err := p.Alloc(pool.Request{Bytes: 3000, Stream: s, Tag: pool.NewTag("weights\xff")}) // which is not UTF-8
	require.NoError(t, err)
	text := scrape(t, New(sys))
	serial := strconv.Itoa(p.Stats().Serial)
	system := `system="` + strconv.FormatInt(core.SystemOf(sys).Serial, 10) + `"`
	labels := `{UUID="` + d.UUID().String() + `",gpu="1",pool="` + serial + `",` + system
	for _, want := range []string{
		"cuvmm_up{" + system + "} 1\n",
		`cuvmm_device_memory_bytes{UUID="` + d.UUID().String() + `",gpu="1",` + system + `} 1.7179869184e+10`,
		`cuvmm_pool_info{UUID="` + d.UUID().String() + `",gpu="1",name="activations",pool="` + serial + `",` + system + `,tag="llm"} 1`,
		"cuvmm_pool_requested_bytes" + labels + "} 3000\n",
		"cuvmm_pool_reserved_bytes" + labels + "} 2.097152e+06\n",
		"cuvmm_pool_limit_bytes" + labels + "} 1.073741824e+09\n",
		"cuvmm_pool_allocations_total" + labels + "} 1\n",
		"cuvmm_pool_tag_requested_bytes" + labels + `,tag="\"weights\\xff\""} 3000`,
		"cuvmm_suspended_bytes{" + system + "} 0\n",
		"cuvmm_suspended_kept_bytes{" + system + "} 0\n",
		"cuvmm_host_idle_bytes{" + system + "} 0\n",
		`cuvmm_objects{kind="allocation",` + system + `} 1`,
		`cuvmm_build_info{cuda="13.0",driver="software",` + system + `,version="`,
		"# TYPE cuvmm_lost_objects_total counter\n",
	} {
		require.Contains(t, text, want)
	}
	for metric, value := range map[string]string{"committed": "2.097152e+06", "peak": "2.097152e+06", "limit": "2.147483648e+09"} {
		require.Regexp(t, `cuvmm_budget_`+metric+`_bytes\{budget="\d+",name="scraped",`+system+`\} `+regexp.QuoteMeta(value)+`\n`, text)
	}
	require.Contains(t, text, "cuvmm_device_free_bytes{")
	require.NotContains(t, text, `cuvmm_device_free_bytes{UUID="`+sys.Devices()[0].UUID().String(), "a scrape makes no context")
	require.NoError(t, p.Free(b))
	require.NoError(t, p.Close())
	require.NoError(t, s.Close())
	require.NotContains(t, scrape(t, New(sys)), "cuvmm_pool")
}

// poolAllocations returns the counter of allocations by the label of its pool.
func poolAllocations(t *testing.T, sys *cuda.System) map[string]string {
	t.Helper()
	counts := map[string]string{}
	for _, m := range regexp.MustCompile(`cuvmm_pool_allocations_total\{.*pool="(\d+)".*\} (\d+)`).FindAllStringSubmatch(scrape(t, New(sys)), -1) {
		counts[m[1]] = m[2]
	}
	return counts
}

// A series is one pool's for ever, and its counters begin at 0: what increases is what
// that pool did.
func TestAPoolKeepsItsSeries(t *testing.T) {
	_, sys := sim.Open(t)
	d := sys.Devices()[0]
	s, err := d.NewStream(cuda.StreamOptions{})
	require.NoError(t, err)
	var pools []*pool.Pool
	var serials []string
	for range 2 {
		p, err := pool.New(d, pool.Options{Statistics: true})
		require.NoError(t, err)
		pools, serials = append(pools, p), append(serials, strconv.Itoa(p.Stats().Serial))
	}
	require.Equal(t, map[string]string{serials[0]: "0", serials[1]: "0"}, poolAllocations(t, sys))
	for i, p := range pools {
		for range 3 + 4*i {
			b, err := p.Alloc(pool.Request{Bytes: 1000, Stream: s})
			require.NoError(t, err)
			require.NoError(t, p.Free(b))
		}
	}
	require.Equal(t, map[string]string{serials[0]: "3", serials[1]: "7"}, poolAllocations(t, sys))
	require.NoError(t, pools[0].Close())
	require.Equal(t, map[string]string{serials[1]: "7"}, poolAllocations(t, sys))
	plain, err := pool.New(d, pool.Options{})
	require.NoError(t, err)
	require.Equal(t, map[string]string{serials[1]: "7"}, poolAllocations(t, sys), "what is not counted has no counter")
	require.NoError(t, plain.Close())
	require.NoError(t, pools[1].Close())
	require.NoError(t, s.Close())
}

// One registry has several Systems of a process.
func TestTwoSystems(t *testing.T) {
	r := prometheus.NewPedanticRegistry()
	for range 2 {
		_, sys := sim.Open(t)
		require.NoError(t, r.Register(New(sys)))
	}
	families, err := r.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() == "cuvmm_up" {
			require.Len(t, f.GetMetric(), 2)
		}
	}
}

// A counter never falls, which what several of a name say may.
func TestOnlyWhatGrowsIsACounter(t *testing.T) {
	values := func(s inspect.Snapshot) map[metric]int {
		got := map[metric]int{}
		shared(s, func(m metric, value int, _ ...string) { got[m] = value })
		return got
	}
	before := values(inspect.Snapshot{Publications: []inspect.Publication{{Name: "w", Generation: 9}, {Name: "w", Generation: 3}}, Followers: []inspect.Follower{{Name: "w", Generation: 9}}})
	for m, value := range values(inspect.Snapshot{Publications: []inspect.Publication{{Name: "w", Generation: 3}}, Followers: []inspect.Follower{{Name: "w", Generation: 1}}}) {
		require.False(t, m.kind == prometheus.CounterValue && value < before[m], "%v", m.desc)
	}
}

// Names and units follow Prometheus's conventions.
func TestNamesAndUnits(t *testing.T) {
	_, sys := sim.Open(t)
	problems, err := testutil.CollectAndLint(New(sys))
	require.NoError(t, err)
	require.Empty(t, problems)
}

func TestWithoutASystem(t *testing.T) {
	require.Contains(t, scrape(t, New(nil)), `cuvmm_up{system="0"} 0`)
}

// Publications of the same name are added up: a scrape with a series twice fails.
func TestPublicationsOfOneName(t *testing.T) {
	var got []string
	shared(inspect.Snapshot{
		Publications: []inspect.Publication{{Name: "w", Bytes: 5, Pinned: 1, Generation: 3, Followers: []inspect.Reader{{Refused: "no"}, {}}}, {Name: "w", Bytes: 2, Generation: 9, Suspended: true}},
		Followers:    []inspect.Follower{{Name: "x", Bytes: 4, Suspended: true}, {Name: "x", Bytes: 4, Stuck: "gone"}},
		Leases:       []inspect.Lease{{Bytes: 7}},
	}, func(m metric, value int, labels ...string) {
		name := regexp.MustCompile(`fqName: "(\w+)"`).FindStringSubmatch(m.desc.String())[1]
		got = append(got, strings.Join(append([]string{name}, labels...), " ")+" "+string(rune('0'+value)))
	})
	require.ElementsMatch(t, []string{"cuvmm_publication_bytes w 7", "cuvmm_publication_pinned_bytes w 1", "cuvmm_publication_followers w 2",
		"cuvmm_publication_refusing_followers w 1", "cuvmm_publication_generation w 9", "cuvmm_publication_suspended w 1", "cuvmm_follower_bytes x 8", "cuvmm_follower_generation x 0",
		"cuvmm_follower_stuck x 1", "cuvmm_follower_suspended x 1", "cuvmm_leases 1", "cuvmm_leased_bytes 7"}, got)
}

// The page describes every metric, and the dashboard uses no other.
func TestThePageAndTheDashboard(t *testing.T) {
	names := regexp.MustCompile(`cuvmm_[a-z_]+`)
	page, err := os.ReadFile("README.md")
	if errors.Is(err, fs.ErrNotExist) {
		needs.Lacks(t, "the repository's sources")
	}
	require.NoError(t, err)
	described := map[string]bool{}
	for _, line := range strings.Split(string(page), "\n") {
		if cells := strings.Split(line, "|"); len(cells) > 3 {
			for _, n := range names.FindAllString(cells[1], -1) {
				described[n] = true
			}
		}
	}
	for n := range all {
		require.True(t, described[n], "%s is not described", n)
	}
	dashboard, err := os.ReadFile("dashboard.json")
	require.NoError(t, err)
	require.True(t, json.Valid(dashboard))
	for _, text := range []string{string(page), string(dashboard)} {
		for _, n := range names.FindAllString(text, -1) {
			require.Contains(t, all, n)
		}
	}
}
