package gputest

import (
	"testing"
	"time"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/cuda/sim"
	"github.com/stretchr/testify/require"
)

// Accounted requires that a System counts what its machine has. The reclaimer retries what
// could not be undone, and may be between the driver's call and the count of it: so the
// two may differ for a moment.
func Accounted(t testing.TB, m *sim.Machine, sys *cuda.System, at string) {
	t.Helper()
	equal := func() bool {
		live, st := m.Live(), sys.Stats()
		return live[sim.KindReservation] == st.Reservations && live[sim.KindAllocation] == st.Allocations && live[sim.KindMapping] <= st.Mappings
	}
	if !equal() {
		require.Eventually(t, equal, time.Minute, time.Millisecond, "the driver has %v, and the System counts %+v: %s", m.Live(), sys.Stats(), at)
	}
}
