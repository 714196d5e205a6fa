package suspend

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// berthed is a member that has nothing but its state.
type berthed struct {
	Member
	status Status
}

func (b *berthed) Status() *Status { return &b.status }

// A member's bytes are in its memory, or kept, or on their way between the two; a move ends
// where it went to, or where it began; and whoever asks a member that is not awake learns since
// when it sleeps.
func TestStatesOfAMember(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &berthed{}
		at := &place{m: m, sleep: &core.Sleep{What: "it"}}
		away, moving := false, false // the model
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				want := map[[2]bool]State{{false, false}: Awake, {false, true}: Suspending, {true, false}: Suspended, {true, true}: Resuming}
				require.Equal(t, want[[2]bool{away, moving}], m.status.State())
				require.Equal(t, away || moving, m.status.Sleep() == at.sleep)
				require.Equal(t, !away && !moving, m.status.Sleep() == nil)
			},
			"event": func(t *rapid.T) {
				e := event(rapid.IntRange(0, int(events)-1).Draw(t, "event"))
				if moving == (e == begin) {
					before := m.status.State()
					require.Panics(t, func() { at.step(e) })
					require.Equal(t, before, m.status.State())
					return
				}
				at.step(e)
				moving = e == begin
				if e == done {
					away = !away
				}
			},
		})
	})
}
