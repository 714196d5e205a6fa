package cuda_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestFabricHandleForms(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var h cuda.FabricHandle
		copy(h[:], rapid.SliceOfN(rapid.Byte(), 64, 64).Draw(t, "bytes"))
		b, err := h.MarshalBinary()
		require.NoError(t, err)
		require.Len(t, b, 64)
		text, err := h.MarshalText()
		require.NoError(t, err)
		require.Len(t, text, 128)
		j, err := json.Marshal(h)
		require.NoError(t, err)
		require.Equal(t, `"`+string(text)+`"`, string(j))
		var fromBinary, fromText, fromJSON cuda.FabricHandle
		require.NoError(t, fromBinary.UnmarshalBinary(b))
		require.NoError(t, fromText.UnmarshalText(text))
		require.NoError(t, json.Unmarshal(j, &fromJSON))
		for _, back := range []cuda.FabricHandle{fromBinary, fromText, fromJSON} {
			require.Equal(t, h, back)
			require.Equal(t, h.String(), back.String())
		}
		other := h
		other[rapid.IntRange(0, 63).Draw(t, "at")] ^= 1
		require.NotEqual(t, h, other)
		require.NotEqual(t, h.String(), other.String())
		// The bytes belong to the caller.
		b[0] ^= 1
		require.Equal(t, h, fromBinary)
	})
	as := map[cuda.FabricHandle]int{{1}: 5}
	text, err := json.Marshal(as)
	require.NoError(t, err)
	var back map[cuda.FabricHandle]int
	require.NoError(t, json.Unmarshal(text, &back))
	require.Equal(t, as, back)
}

// However it is printed, not more than the short form is seen.
func TestAFabricHandleIsNeverPrintedWhole(t *testing.T) {
	var h cuda.FabricHandle
	for i := range h {
		h[i] = byte(0xa1 + i)
	}
	short := h.String()
	require.Regexp(t, `^fabric:[0-9a-f]{12}$`, short)
	telling := func(text string) bool {
		for _, part := range []string{fmt.Sprintf("%d %d", h[0], h[1]), hex.EncodeToString(h[:2]), strings.ToUpper(hex.EncodeToString(h[:2])), string(h[:2]), "0xa1"} {
			if strings.Contains(text, part) {
				return true
			}
		}
		return false
	}
	type holder struct {
		Handle cuda.FabricHandle
		All    []cuda.FabricHandle
		At     *cuda.FabricHandle
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "% x", "%d", "%o", "%b", "%c", "%U", "%t", "%64.64x"} {
		require.Equal(t, short, fmt.Sprintf(verb, h), verb)
		require.Equal(t, short, fmt.Sprintf(verb, &h), verb)
		for _, v := range []any{[]cuda.FabricHandle{h}, [1]cuda.FabricHandle{h}, map[string]cuda.FabricHandle{"a": h}, holder{Handle: h, All: []cuda.FabricHandle{h}, At: &h}} {
			text := fmt.Sprintf(verb, v)
			require.Contains(t, text, short, verb)
			require.False(t, telling(text), "%s: %s", verb, text)
		}
	}
	for _, make := range []func(b *bytes.Buffer) slog.Handler{
		func(b *bytes.Buffer) slog.Handler { return slog.NewTextHandler(b, nil) },
		func(b *bytes.Buffer) slog.Handler { return slog.NewJSONHandler(b, nil) },
	} {
		var b bytes.Buffer
		slog.New(make(&b)).Info("exported", "handle", h, "error", fmt.Errorf("no memory behind %v", h))
		require.Equal(t, 2, strings.Count(b.String(), short), b.String())
		require.False(t, telling(b.String()), b.String())
	}
}

func TestWhatIsNoFabricHandle(t *testing.T) {
	whole := strings.Repeat("0a", 64)
	for name, text := range map[string]string{
		"nothing": "", "short": whole[:126], "odd": whole[:127], "long": whole + "00", "capitals": strings.ToUpper(whole),
		"a space": " " + whole[1:], "a line end": whole[:127] + "\n", "a prefix": "0x" + whole[2:], "no digit": whole[:127] + "g",
		"a letter of two bytes": whole[:126] + "é",
	} {
		h := cuda.FabricHandle{7}
		err := h.UnmarshalText([]byte(text))
		require.ErrorIs(t, err, cuda.ErrInvalidArgument, name)
		require.NotContains(t, err.Error(), "0a0a", name)
		require.Equal(t, cuda.FabricHandle{7}, h, name)
	}
	for _, n := range []int{0, 1, 63, 65, 128} {
		h := cuda.FabricHandle{7}
		require.ErrorIs(t, h.UnmarshalBinary(make([]byte, n)), cuda.ErrInvalidArgument)
		require.Equal(t, cuda.FabricHandle{7}, h)
	}
}

// What is read is written back the same.
func FuzzFabricHandleText(f *testing.F) {
	f.Add([]byte(strings.Repeat("0f", 64)))
	f.Add([]byte("0F"))
	f.Fuzz(func(t *testing.T, text []byte) {
		var h cuda.FabricHandle
		if err := h.UnmarshalText(text); err != nil {
			require.ErrorIs(t, err, cuda.ErrInvalidArgument)
			require.Zero(t, h)
			return
		}
		back, err := h.MarshalText()
		require.NoError(t, err)
		require.Equal(t, text, back)
	})
}
