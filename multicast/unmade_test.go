package multicast_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/gputest"
	"github.com/cuvmm/cuvmm/multicast"
)

func TestNilAndZeroObjectsAreRefused(t *testing.T) {
	gputest.Unmade(t, []any{
		(*multicast.Object)(nil), &multicast.Object{}, (*multicast.Binding)(nil), &multicast.Binding{},
		(*multicast.Team)(nil), &multicast.Team{},
	}, "Binding.Closing", "Team.SetCallTimeout")
}
