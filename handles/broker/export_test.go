package broker

import (
	"context"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/internal/wire"
)

// AttachKeeping is Attach of an object whose descriptors can be exported again.
func (k *Client) AttachKeeping(ctx context.Context, d *cuda.Device, name string) (*Object, error) {
	if err := k.made("broker.Client.AttachKeeping"); err != nil {
		return nil, err
	}
	return k.take(ctx, "broker.Client.AttachKeeping", d, request{kind: wire.BrokerAttach, name: name}, handles.ImportOptions{ReadOnly: true, KeepDescriptors: true})
}

// AttachWriting is Attach by a process that breaks the rule not to write.
func (k *Client) AttachWriting(ctx context.Context, d *cuda.Device, name string) (*Object, error) {
	if err := k.made("broker.Client.AttachWriting"); err != nil {
		return nil, err
	}
	return k.take(ctx, "broker.Client.AttachWriting", d, request{kind: wire.BrokerAttach, name: name}, handles.ImportOptions{})
}

// Ending reports whether the broker serves nobody any more.
func (b *Broker) Ending() bool { return b.ending() != nil }
