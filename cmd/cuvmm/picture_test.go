package main

import (
	"bytes"
	"fmt"
	"io"
	"regexp"
	"strings"
	"testing"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/stretchr/testify/require"
)

// many returns a snapshot of a pool with so many blocks, in chunks of 2 MiB.
func many(blocks int) inspect.Snapshot {
	const chunk, block = 2 << 20, 12 << 10
	segment := inspect.Segment{Ptr: 1 << 40, Kind: "region"}
	r := inspect.Reservation{Ptr: 1 << 40, Bytes: 1 << 38}
	for i := range blocks {
		segment.Blocks = append(segment.Blocks, inspect.Block{Offset: i * 2 * block, Bytes: block, Requested: block - 5, Waiting: i%99 == 1, Tag: fmt.Sprint("tag ", i%40)})
	}
	s := inspect.Snapshot{Format: inspect.Format, Version: inspect.Version}
	for segment.Bytes < blocks*2*block {
		id := uint64(segment.Bytes/chunk + 1)
		s.Memory = append(s.Memory, inspect.Memory{ID: id, Bytes: chunk, Location: "device 0", Mappings: 1})
		r.Mappings = append(r.Mappings, inspect.Mapping{Offset: segment.Bytes, Bytes: chunk, Memory: id})
		segment.Bytes += chunk
	}
	s.Reservations = []inspect.Reservation{r}
	s.Pools = []inspect.Pool{{Blocks: blocks, Reserved: segment.Bytes, Segments: []inspect.Segment{segment}}}
	return s
}

var controls = regexp.MustCompile("\x1b\\[[0-9;?]*[a-zA-Z]")

// widest returns the cells of the longest row of a map.
func widest(text string) (cells int) {
	for _, line := range strings.Split(controls.ReplaceAllString(text, ""), "\n") {
		if line = strings.TrimSpace(line); strings.Trim(line, "█▓▒░·") == "" {
			cells = max(cells, len([]rune(line)))
		}
	}
	return cells
}

// What a map prints depends on its rows and not on the number of blocks.
func TestThePictureOfManyBlocks(t *testing.T) {
	for _, blocks := range []int{1_000, 10_000, 100_000} {
		for _, rows := range []int{1, 10, 30} {
			var out bytes.Buffer
			picture{out: &out, cells: &out, width: 80, rows: rows}.write(many(blocks))
			cells := 0
			for line := range strings.Lines(out.String()) {
				if n := widest(line); n > 0 {
					require.LessOrEqual(t, n, 80)
					cells += n
				}
			}
			require.LessOrEqual(t, cells, rows*80)
			require.Greater(t, cells, rows*80/4, "as large as there is room")
			require.Less(t, out.Len(), 3*rows*80+2000)
		}
	}
}

// BenchmarkPicture is the time to draw a map, and to read its snapshot first.
func BenchmarkPicture(b *testing.B) {
	for _, blocks := range []int{1_000, 10_000, 100_000} {
		s := many(blocks)
		var file bytes.Buffer
		require.NoError(b, s.Write(&file))
		b.Run(fmt.Sprintf("draw/%d", blocks), func(b *testing.B) {
			for b.Loop() {
				picture{out: io.Discard, cells: io.Discard, width: 120, rows: 40, color: true}.write(s)
			}
		})
		b.Run(fmt.Sprintf("read/%d", blocks), func(b *testing.B) {
			for b.Loop() {
				_, err := inspect.Read(bytes.NewReader(file.Bytes()))
				require.NoError(b, err)
			}
		})
	}
}
