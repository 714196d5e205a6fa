package cuda

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
)

// elfOf is an ELF header that says where its tables are.
func elfOf(size int, phoff uint64, phnum int, shoff uint64, shnum int) []byte {
	h := elf.Header64{Phoff: phoff, Phentsize: 56, Phnum: uint16(phnum), Shoff: shoff, Shentsize: 64, Shnum: uint16(shnum)}
	copy(h.Ident[:], elfMagic)
	var b bytes.Buffer
	_ = binary.Write(&b, binary.LittleEndian, h)
	return append(b.Bytes(), make([]byte, size-b.Len())...)
}

// fatOf is the header of a fat binary.
func fatOf(size int, says uint64) []byte {
	b := append([]byte(fatMagic), 1, 0, 16, 0)
	return append(binary.LittleEndian.AppendUint64(b, says), make([]byte, size-16)...)
}

// The driver is told no length: what ends too early must not reach it.
func TestImagesThatAreCutShortAreRefused(t *testing.T) {
	for _, row := range []struct {
		what  string
		image []byte
		says  string
	}{
		{"nothing", nil, "an empty image"},
		{"text", []byte(".version 7.5"), ""},
		{"an ELF file", elfOf(500, 64, 2, 244, 4), ""},
		{"an ELF file without its last byte", elfOf(499, 64, 2, 244, 4), "499 bytes that says it has 500"},
		{"an ELF file whose first table is behind the end", elfOf(500, 445, 1, 244, 4), "says it has 501"},
		{"an ELF header alone", []byte(elfMagic), "4 bytes whose header is cut short"},
		{"an ELF file with absurd offsets", elfOf(500, 1<<64-2, 2, 0, 0), "500 bytes whose header is cut short or gives no size"},
		{"a fat binary", fatOf(100, 84), ""},
		{"a fat binary without its last byte", fatOf(99, 84), "99 bytes that says it has 100"},
		{"a fat binary with an absurd size", fatOf(99, 1<<64-3), "gives no size"},
		{"a fat binary's first bytes", []byte(fatMagic + "\x01"), "cut short"},
	} {
		t.Run(row.what, func(t *testing.T) {
			err := checkImage("cuda.Device.LoadModule", row.image)
			if row.says == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, ErrInvalidArgument)
			require.ErrorContains(t, err, row.says)
		})
	}
}

func FuzzImageEnd(f *testing.F) {
	f.Add(elfOf(500, 64, 2, 244, 4))
	f.Add(fatOf(100, 84))
	f.Add([]byte(".version 7.5\n.target sm_70"))
	f.Fuzz(func(t *testing.T, image []byte) {
		end, isBinary := imageEnd(image)
		require.Equal(t, bytes.HasPrefix(image, []byte(elfMagic)) || bytes.HasPrefix(image, []byte(fatMagic)), isBinary)
		if !isBinary {
			require.Zero(t, end)
		}
		_ = describeImage(image)
	})
}
