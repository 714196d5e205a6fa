package inspect_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/inspect"
	"github.com/stretchr/testify/require"
)

func used(blocks ...inspect.Block) inspect.Snapshot {
	return inspect.Snapshot{
		Buffers: []inspect.Buffer{{Ptr: 0x1000, Committed: 64, Stack: 1}},
		Pools:   []inspect.Pool{{Serial: 4, Segments: []inspect.Segment{{Ptr: 0x9000, Blocks: blocks}}}},
		Stacks: []inspect.Stack{{"github.com/cuvmm/cuvmm/vmm.NewBuffer (/src/vmm/buffer.go:3)", "example.org/model.Load (/src/model/load.go:10)"},
			{"main.cache (cache.go:7)"}},
	}
}

func TestUsesAndTheirChanges(t *testing.T) {
	before := used(inspect.Block{Requested: 5, Tag: "kv"}, inspect.Block{Requested: 100, Stack: 2}, inspect.Block{Requested: 7}, inspect.Block{Requested: 1, Waiting: true})
	require.Equal(t, []inspect.Use{{"main.cache (cache.go:7)", 100, 1}, {"model.Load (load.go:10)", 64, 1}, {"blocks without a tag", 7, 1}, {"kv", 5, 1}}, before.Uses())
	after := used(inspect.Block{Requested: 5, Tag: "kv"}, inspect.Block{Requested: 20, Tag: "kv"}, inspect.Block{Requested: 6}, inspect.Block{Requested: 1})
	require.Equal(t, []inspect.Use{{"main.cache (cache.go:7)", -100, -1}, {"kv", 20, 1}, {"blocks without a tag", 0, 1}}, inspect.Compare(before, after))
	require.Empty(t, inspect.Compare(after, after))
	after.Sparse = []inspect.Sparse{{Tag: "kv", Name: "a", Page: 8, Mapped: 3}, {Name: "b", Page: 8, Mapped: 2}}
	require.Equal(t, []inspect.Use{{"kv", 24, 1}, {"b", 16, 1}}, inspect.Compare(used(inspect.Block{Requested: 5, Tag: "kv"}, inspect.Block{Requested: 20, Tag: "kv"}, inspect.Block{Requested: 6}, inspect.Block{Requested: 1}), after))
}

func TestHolder(t *testing.T) {
	s := used(inspect.Block{Requested: 5})
	range1 := inspect.Reservation{Ptr: 0x1000, Bytes: 0x1000}
	require.Equal(t, "buffer", s.Holder(range1))
	s.Followers = []inspect.Follower{{Name: "w", Ptr: 0x1000, PID: 7}}
	require.Equal(t, `buffer, follows "w" of process 7`, s.Holder(range1))
	s.Publications = []inspect.Publication{{Name: "w", Ptr: 0x1000}}
	require.Equal(t, `buffer, published as "w"`, s.Holder(range1))
	require.Equal(t, "pool 4 on device 0", s.Holder(inspect.Reservation{Ptr: 0x8000, Bytes: 0x2000}))
	require.Empty(t, s.Holder(inspect.Reservation{Ptr: 0xa000, Bytes: 0x2000}))
}

// What a program named is shown with its name.
func TestHoldersHaveNames(t *testing.T) {
	r := inspect.Reservation{Ptr: 1 << 30, Bytes: 1 << 21}
	pool := inspect.Pool{Serial: 3, Device: 1, Segments: []inspect.Segment{{Ptr: r.Ptr, Bytes: r.Bytes}}}
	for want, s := range map[string]inspect.Snapshot{
		`sparse range "a"`:                     {Sparse: []inspect.Sparse{{Ptr: r.Ptr, Name: "a"}}},
		`buffer "a", imported`:                 {Buffers: []inspect.Buffer{{Ptr: r.Ptr, Name: "a", Imported: true}}},
		`buffer "a", published as "b"`:         {Buffers: []inspect.Buffer{{Ptr: r.Ptr, Name: "a"}}, Publications: []inspect.Publication{{Name: "b", Ptr: r.Ptr}}},
		`buffer "a", follows "b" of process 7`: {Buffers: []inspect.Buffer{{Ptr: r.Ptr, Name: "a"}}, Followers: []inspect.Follower{{Name: "b", Ptr: r.Ptr, PID: 7}}},
	} {
		require.Equal(t, want, s.Holder(r))
	}
	pool.Name = "scratch"
	require.Equal(t, `pool 3 "scratch" on device 1`, pool.Title())
	require.Equal(t, pool.Title(), inspect.Snapshot{Pools: []inspect.Pool{pool}}.Holder(r))
}
