package life_test

import (
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/life"
	"github.com/stretchr/testify/require"
)

func TestLabelsAreShortAndPrintable(t *testing.T) {
	for text, refused := range map[string]bool{
		"": false, "weights": false, "layer 17: Schlüssel 🔑": false, strings.Repeat("x", 128): false,
		strings.Repeat("x", 129): true, strings.Repeat("ü", 65): true,
		"a\nb": true, "a\x1b[31m": true, "a\x00": true, "\xff": true, "a\u202eb": true, " a": true, "a ": true, " ": true, "a\u00a0b": true,
	} {
		for what, l := range map[string]life.Label{"Name": {Name: text}, "Tag": {Tag: text}} {
			err := l.Check("op")
			if !refused {
				require.NoError(t, err, "%q", text)
				continue
			}
			require.ErrorIs(t, err, cuda.ErrInvalidArgument, "%q", text)
			require.ErrorContains(t, err, what)
			var e *cuda.Error
			require.ErrorAs(t, err, &e)
			require.NotEmpty(t, e.Hint)
			require.Equal(t, strings.ToValidUTF8(err.Error(), ""), err.Error())
			require.NotContains(t, err.Error(), "\x1b")
		}
	}
}

func TestTitlesHaveTheLabel(t *testing.T) {
	for want, l := range map[string]life.Label{
		`buffer`:                        {},
		`buffer "weights"`:              {Name: "weights"},
		`buffer tagged "llm"`:           {Tag: "llm"},
		`buffer "weights" tagged "llm"`: {Name: "weights", Tag: "llm"},
	} {
		var list life.List
		list.Init(nil, false)
		o := &labeled{}
		o.SetLabel(l)
		list.Add(o, life.KindBuffer, 2<<20, 0)
		require.Equal(t, want, o.Title())
		require.Equal(t, want+" of 2 MiB", list.Describe()[0])
		require.Equal(t, l, o.Label())
		if l == (life.Label{}) {
			want = ""
			require.Zero(t, testing.AllocsPerRun(10, func() { _ = o.Title() }), "without a label it costs nothing")
		}
		require.Equal(t, want, o.Called())
		o.Untrack()
	}
}

type labeled struct{ life.Object }
