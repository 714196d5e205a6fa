package core_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/stretchr/testify/require"
)

func TestLocalsAreKeptByNumber(t *testing.T) {
	_, s, st := system(t, core.Config{})
	a, b := s.NewStreamKey(), s.NewStreamKey()
	require.NotEqual(t, a, b)
	require.Nil(t, st.Locals.Get(b))
	st.Locals.Set(b, "b")
	require.Equal(t, "b", st.Locals.Get(b))
	require.Nil(t, st.Locals.Get(a))
	st.Locals.Set(b, nil)
	require.Nil(t, st.Locals.Get(b))
	s.FreeStreamKey(a)
	require.Equal(t, a, s.NewStreamKey(), "numbers are used again")
	s.FreeStreamKey(a)
	s.FreeStreamKey(b)
}

func TestWhetherAStreamMayCapture(t *testing.T) {
	_, s, st := system(t, core.Config{})
	require.False(t, st.MayCapture())
	st.TakePart()
	require.True(t, st.MayCapture(), "until the driver says that it is over")
	status, _, r := st.Capture()
	require.Equal(t, driver.Success, r)
	require.Equal(t, driver.CaptureNone, status)
	require.False(t, st.MayCapture())
	require.Equal(t, driver.Success, s.Drv.StreamBeginCapture(st.Ctx.Handle, st.Handle, driver.CaptureRelaxed))
	st.TakePart()
	_, _, r = st.Capture()
	require.Equal(t, driver.Success, r)
	require.True(t, st.MayCapture(), "it does")
	g, r := s.Drv.StreamEndCapture(st.Ctx.Handle, st.Handle)
	require.Equal(t, driver.Success, r)
	require.Equal(t, driver.Success, s.Drv.GraphDestroy(g))
	st.Expose()
	_, _, _ = st.Capture()
	require.True(t, st.MayCapture(), "others have its handle")
}
