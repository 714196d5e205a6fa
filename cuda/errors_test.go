package cuda_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/stretchr/testify/require"
)

var sentinels = map[errs.Kind]error{
	errs.OutOfMemory: cuda.ErrOutOfMemory, errs.OutOfAddressSpace: cuda.ErrOutOfAddressSpace, errs.Budget: cuda.ErrBudget,
	errs.NotSupported: cuda.ErrNotSupported, errs.NotPermitted: cuda.ErrNotPermitted, errs.Closed: cuda.ErrClosed,
	errs.InUse: cuda.ErrInUse, errs.Foreign: cuda.ErrForeign, errs.OutOfRange: cuda.ErrOutOfRange, errs.Capacity: cuda.ErrCapacity,
	errs.Capturing: cuda.ErrCapturing, errs.DeviceLost: cuda.ErrDeviceLost, errs.NoDriver: cuda.ErrNoDriver,
	errs.Moved: cuda.ErrMoved, errs.Suspended: cuda.ErrSuspended, errs.InvalidArgument: cuda.ErrInvalidArgument,
}

func TestTheHintOfALossDoesNotContradictItsCause(t *testing.T) {
	f := errs.Failure{Op: "cuda.Stream.Synchronize", Call: driver.CallStreamSynchronize, Result: driver.IllegalAddress}
	require.ErrorContains(t, errs.New(f), "usual cause")
	f.Err = errors.New("device 0 has read access")
	err := errs.New(f)
	require.ErrorIs(t, err, cuda.ErrDeviceLost)
	require.ErrorContains(t, err, "device 0 has read access; restart the process")
	require.NotContains(t, err.Error(), "usual cause")
}

func TestEachKindIsOneSentinel(t *testing.T) {
	for kind := errs.OutOfMemory; kind <= errs.InvalidArgument; kind++ {
		require.Error(t, sentinels[kind], "kind %d", kind)
		err := fmt.Errorf("wrapped: %w", errs.New(errs.Failure{Op: "x.Op", Kind: kind, Asked: "17 bytes", Hint: "do less"}))
		for other, sentinel := range sentinels {
			require.Equal(t, other == kind, errors.Is(err, sentinel), "%v and %v", err, sentinel)
		}
		require.ErrorContains(t, err, "x.Op: "+sentinels[kind].Error()+": 17 bytes; do less")
	}
	require.ErrorIs(t, errs.New(errs.Failure{Kind: errs.NotSupported}), errors.ErrUnsupported)
	require.NotErrorIs(t, errs.New(errs.Failure{Kind: errs.NotPermitted}), errors.ErrUnsupported)
}

// One code of the driver means different things from different calls.
func TestWhatTheDriversCodesMean(t *testing.T) {
	for _, c := range []struct {
		call   driver.Call
		result driver.Result
		is     error
		says   string
	}{
		{driver.CallMemCreate, driver.OutOfMemory, cuda.ErrOutOfMemory, "free device memory"},
		{driver.CallMemsetD8Async, driver.InvalidValue, cuda.ErrInvalidArgument, "memory that is mapped"},
		{driver.CallMemcpyDtoDAsync, driver.InvalidValue, cuda.ErrInvalidArgument, "memory that is mapped"},
		{driver.CallMemAddressReserve, driver.OutOfMemory, cuda.ErrOutOfAddressSpace, "physical memory is not what ran out"},
		{driver.CallMemMap, driver.NotSupported, cuda.ErrInvalidArgument, "mapped whole"},
		{driver.CallMemCreate, driver.NotSupported, cuda.ErrNotSupported, ""},
		{driver.CallMemCreate, driver.NotPermitted, cuda.ErrNotPermitted, "IMEX"},
		{driver.CallMemImportFromShareableHandle, driver.Unknown, cuda.ErrInvalidArgument, "not an exported CUDA allocation"},
		{driver.CallMemExportToShareableHandle, driver.InvalidValue, cuda.ErrInvalidArgument, "forwarded"},
		{driver.CallStreamEndCapture, driver.CaptureUnjoined, cuda.ErrCapturing, "joined"},
		{driver.CallEventQuery, driver.CapturedEvent, cuda.ErrCapturing, "recorded into a capture"},
		{driver.CallStreamSynchronize, driver.IllegalAddress, cuda.ErrDeviceLost, "restart the process"},
		{driver.CallStreamSynchronize, driver.Deinitialized, cuda.ErrDeviceLost, "shutting down with the process"},
		{driver.CallStreamGetID, driver.MissingEntryPoint, cuda.ErrNotSupported, "cuStreamGetId; it needs a driver for CUDA 12.0"},
		{driver.CallInit, driver.NoDevice, cuda.ErrNoDriver, "CUDA_VISIBLE_DEVICES"},
		{driver.CallMemCreate, driver.NotInitialized, cuda.ErrNoDriver, "fork"},
		{driver.CallInit, driver.Unknown, nil, "nvidia-uvm"},
		{driver.CallInit, driver.InvalidDevice, nil, "CUDA_VISIBLE_DEVICES"},
	} {
		err := errs.New(errs.Failure{Op: "x.Op", Call: c.call, Result: c.result, Asked: "17 bytes"})
		if c.is != nil {
			require.ErrorIs(t, err, c.is)
		}
		require.ErrorContains(t, err, c.says)
		var e *cuda.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, c.call.String(), e.Call)
		require.Equal(t, cuda.Code(c.result), e.Code)
		require.Equal(t, c.result.String(), e.Code.String())
		for _, part := range []string{"x.Op", "17 bytes", c.call.String(), c.result.String()} {
			require.ErrorContains(t, err, part)
		}
	}
	require.ErrorIs(t, errs.New(errs.Failure{Result: driver.MissingEntryPoint}), errors.ErrUnsupported)
}

func TestAnErrorKeepsItsCause(t *testing.T) {
	cause := errors.New("the cause")
	err := errs.New(errs.Failure{Op: "x.Op", Kind: errs.NoDriver, Err: cause})
	require.ErrorIs(t, err, cause)
	require.ErrorIs(t, err, cuda.ErrNoDriver)
	require.ErrorContains(t, err, "the cause")
	plain := errs.New(errs.Failure{Op: "x.Op", Call: driver.CallInit, Result: 12345})
	require.Equal(t, "x.Op: cuInit returned CUDA error 12345", plain.Error())
	var e *cuda.Error
	require.ErrorAs(t, plain, &e)
	require.Empty(t, e.Unwrap())
}

// Refusals name the remedy.
func TestRefusalsSayWhatToDo(t *testing.T) {
	_, d := open(t)
	s := stream(t, d)
	_, noMode := s.WithCapture(cuda.CaptureOptions{Mode: 9}, func() error { return nil })
	_, noBytes := d.NewHostBuffer(0)
	_, noContext := d.WithContext(0)
	_, perThread := d.BorrowStream(2)
	_, strange := d.CanAccess(another(t, d))
	for _, err := range []error{
		noMode, noBytes, noContext, perThread, strange,
		s.Wait(nil), s.Memset(0, 0, -1), s.CopyFromHost(0, cuda.HostSlice{}), (*cuda.Event)(nil).Record(s), (*cuda.Graph)(nil).Launch(s),
	} {
		var e *cuda.Error
		require.ErrorAs(t, err, &e)
		require.NotEmpty(t, e.Hint, "%v", err)
		require.NotEmpty(t, e.Op, "%v", err)
		require.NotEmpty(t, e.Asked, "%v", err)
		require.Empty(t, e.Call)
	}
}
