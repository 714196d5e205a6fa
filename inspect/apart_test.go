package inspect

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A reservation that was closed during the walk, whose addresses another took, is not
// shown beside that one.
func TestReservationsDoNotOverlap(t *testing.T) {
	r := func(ptr Address, bytes, stack int) Reservation {
		return Reservation{Ptr: ptr, Bytes: bytes, Stack: stack}
	}
	for _, c := range []struct{ read, want []Reservation }{
		{nil, nil},
		{[]Reservation{r(20, 10, 1), r(0, 20, 2)}, []Reservation{r(0, 20, 2), r(20, 10, 1)}},
		{[]Reservation{r(0, 30, 1), r(10, 10, 2)}, []Reservation{r(10, 10, 2)}},
		{[]Reservation{r(10, 10, 1), r(0, 30, 2)}, []Reservation{r(0, 30, 2)}},
		{[]Reservation{r(10, 10, 1), r(10, 10, 2)}, []Reservation{r(10, 10, 2)}},
		{[]Reservation{r(0, 10, 1), r(10, 20, 2), r(40, 5, 3), r(20, 20, 4)}, []Reservation{r(0, 10, 1), r(20, 20, 4), r(40, 5, 3)}},
	} {
		require.Equal(t, c.want, apart(c.read))
	}
}
