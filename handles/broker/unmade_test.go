//go:build linux

package broker_test

import (
	"testing"

	"github.com/cuvmm/cuvmm/handles/broker"
	"github.com/cuvmm/cuvmm/internal/test/gputest"
)

func TestObjectsThatNobodyMade(t *testing.T) {
	gputest.Unmade(t, (*broker.Broker)(nil), &broker.Broker{}, (*broker.Client)(nil), &broker.Client{}, (*broker.Object)(nil), (*broker.Writer)(nil), &broker.Writer{}, (*broker.Kept)(nil), &broker.Kept{})
}
