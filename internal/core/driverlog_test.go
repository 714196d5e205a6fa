package core

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

func TestTheLatestMessageOfACall(t *testing.T) {
	const log = "[22:21:32.099][25642][CUDA][E][cuMemMap] size [2] is wrong\n" +
		"[22:21:32.100][25642][CUDA][E][cuMemAlloc_v2] too large\n" +
		"[22:21:32.101][25643][CUDA][E][cuMemMap] offset must be 0\n" +
		"Log buffer rolled over\n[unfinished\n\x00"
	for call, want := range map[driver.Call]string{
		driver.CallMemMap: "offset must be 0", driver.CallMemAlloc: "too large", driver.CallMemUnmap: "",
	} {
		require.Equal(t, want, latestOf(call, log))
	}
}
