package life_test

import (
	"log/slog"
	"sync"
	"testing"

	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/stretchr/testify/require"
)

// Objects that stay are seen once each, in order, whatever comes and goes meanwhile.
func TestEachBesideChanges(t *testing.T) {
	l := list(slog.DiscardHandler, false)
	const stay = 3000
	var passing [stay]life.Object
	kept := map[*life.Object]int{}
	objects := make([]life.Object, stay)
	for i := range objects {
		l.Add(&passing[i], life.KindEvent, 0, 0)
		l.Add(&objects[i], life.KindBuffer, uint64(i), 0)
		kept[&objects[i]] = i
	}
	var changing sync.WaitGroup
	changing.Go(func() {
		for i := range passing {
			passing[i].Untrack()
			if i%3 == 0 {
				var o life.Object
				l.Add(&o, life.KindEvent, 0, 0)
				require.False(t, l.IfEmpty(func() bool { return true }))
				o.Untrack()
			}
		}
	})
	for range 20 {
		next := 0
		l.Each(func(o *life.Object, owner life.Owner) {
			if i, stays := kept[o]; stays {
				require.Equal(t, next, i)
				require.Same(t, o, owner)
				require.EqualValues(t, i, o.Bytes())
				next++
			}
		})
		require.Equal(t, stay, next)
	}
	changing.Wait()
	for i := range objects {
		objects[i].Untrack()
	}
	empty := 0
	l.Each(func(*life.Object, life.Owner) { empty++ })
	require.Zero(t, empty)
	require.True(t, l.IfEmpty(func() bool { return true }))
}
