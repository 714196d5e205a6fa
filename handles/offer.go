package handles

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/internal/core"
	"github.com/cuvmm/cuvmm/internal/errs"
	"github.com/cuvmm/cuvmm/internal/exchange"
	"github.com/cuvmm/cuvmm/internal/share"
	"github.com/cuvmm/cuvmm/internal/wire"
	"github.com/cuvmm/cuvmm/vmm"
)

// Offer is memory that can be imported without a connection: a descriptor and
// handles of one type. It is a plain value, which a [Lease] makes. An offer of
// fabric handles travels as text (MarshalText, and with it JSON), in a file,
// an argument or a store, to any host of the fabric. An offer of descriptors needs its
// Files passed beside it, within a host.
//
// It is valid as long as its lease. String and log/slog leave the handles out.
type Offer struct {
	Descriptor Descriptor
	// Lease identifies the lease, for the receipt.
	Lease [16]byte
	// Handles has one for each chunk if Descriptor.Handle is vmm.Fabric.
	Handles []cuda.FabricHandle
	// Files has one for each chunk if Descriptor.Handle is vmm.PosixFD. They are not
	// part of the text, and belong to the process that made or received them.
	Files []*peer.FD
}

// offerPrefix names the text form and its version.
const offerPrefix = "cuvmmoffer1:"

// The binary form is the descriptor's, the lease 16, and the fabric handles 64
// each, as many as there are chunks.
const maxOfferBytes = MaxDescriptorBytes + 16 + 64*MaxChunks

// String describes the memory and its exporter.
func (o Offer) String() string {
	return fmt.Sprintf("%s of %s in %s by %v, from %v", o.Descriptor.what(), errs.Bytes(o.Descriptor.Size()), errs.Count(len(o.Descriptor.Chunks), "chunk"), o.Descriptor.Handle, o.Descriptor.Exporter)
}

// LogValue returns String.
func (o Offer) LogValue() slog.Value { return slog.StringValue(o.String()) }

func errZeroOffer(op string) error {
	return errs.Peer(op, ErrDescriptor, "a zero Offer", "take it from Lease.Offer, or read its text with UnmarshalText")
}

func (o *Offer) check(op string) error {
	have := len(o.Files)
	switch d := &o.Descriptor; {
	case d.Handle == vmm.Fabric:
		have = len(o.Handles)
	case d.Handle != vmm.PosixFD || len(o.Handles) > 0:
		return errs.Peer(op, ErrDescriptor, fmt.Sprintf("an offer by %v with %s", d.Handle, errs.Count(len(o.Handles), "fabric handle")), "offer by one type of handle")
	}
	if chunks := len(o.Descriptor.Chunks); have != chunks {
		return errs.Peer(op, ErrDescriptor, fmt.Sprintf("%s for %s", errs.Count(have, "handle"), errs.Count(chunks, "chunk")), "pass the offer as the lease returned it, with its files")
	}
	return nil
}

// MarshalText returns the one text form of an offer of fabric handles. For an
// offer of descriptors it leaves the files out.
func (o Offer) MarshalText() ([]byte, error) {
	const op = "handles.Offer.MarshalText"
	if o.Descriptor.Kind == 0 {
		return nil, errZeroOffer(op)
	}
	b, err := o.Descriptor.MarshalBinary()
	if err != nil {
		return nil, err
	}
	if o.Descriptor.Handle == vmm.Fabric {
		if err := o.check(op); err != nil {
			return nil, err
		}
	} else if o.Descriptor.Handle != vmm.PosixFD || len(o.Handles) > 0 {
		return nil, o.check(op)
	}
	b = append(b, o.Lease[:]...)
	for _, h := range o.Handles {
		b = append(b, h[:]...)
	}
	return textEncoding.AppendEncode([]byte(offerPrefix), b), nil
}

// UnmarshalText reads the text form, and refuses anything else. After an error the
// offer is unchanged.
func (o *Offer) UnmarshalText(text []byte) error {
	const op = "handles.Offer.UnmarshalText"
	b, err := decodeText(op, text, offerPrefix, maxOfferBytes)
	if err != nil {
		return err
	}
	r := wire.Decoder{B: b}
	var n Offer
	if n.Descriptor, err = decodeDescriptor(op, &r); err != nil {
		return err
	}
	copy(n.Lease[:], r.Raw(len(n.Lease)))
	malformed := func(format string, args ...any) error {
		return errs.Peer(op, ErrDescriptor, fmt.Sprintf(format, args...), "pass the text of MarshalText")
	}
	chunks := len(n.Descriptor.Chunks)
	switch n.Descriptor.Handle {
	case vmm.Fabric:
		n.Handles = make([]cuda.FabricHandle, chunks)
	case vmm.PosixFD:
	default:
		return malformed("an offer by %v", n.Descriptor.Handle)
	}
	for i := range n.Handles {
		copy(n.Handles[i][:], r.Raw(len(n.Handles[i])))
	}
	if err := r.End(); err != nil {
		return malformed("%v, in the lease and the handles of %s", err, errs.Count(chunks, "chunk"))
	}
	*o = n
	return nil
}

// decodeText decodes a prefix and strict base64 without line ends.
func decodeText(op string, text []byte, prefix string, most int) ([]byte, error) {
	if limit := len(prefix) + textEncoding.EncodedLen(most); len(text) > limit {
		return nil, errs.Peer(op, peer.ErrTooLarge, fmt.Sprintf("%d bytes, of which there are at most %d", len(text), limit), "pass the text of MarshalText")
	}
	code, ok := strings.CutPrefix(string(text), prefix)
	if !ok {
		return nil, errs.Peer(op, ErrDescriptor, fmt.Sprintf("it begins with %q instead of %q", text[:min(len(text), len(prefix))], prefix),
			"pass the text of MarshalText, of the same version of this library")
	}
	if i := strings.IndexAny(code, "\r\n"); i >= 0 {
		return nil, errs.Peer(op, ErrDescriptor, fmt.Sprintf("a line end after %s", errs.Count(len(prefix)+i, "byte")), "pass the text without white space")
	}
	b, err := textEncoding.DecodeString(code)
	if err != nil {
		return nil, errs.PeerCause(err, op, ErrDescriptor, "", "pass the text of MarshalText")
	}
	return b, nil
}

// Receipt confirms that a process has imported an offer. It travels back to
// the exporter by any means, as text, for [Lease.Imported].
type Receipt struct {
	Lease    [16]byte
	Importer Process
}

const receiptPrefix = "cuvmmreceipt1:"

// Receipt returns this process's receipt for the offer, to be sent after the import.
func (o Offer) Receipt() Receipt { return Receipt{Lease: o.Lease, Importer: Self()} }

// MarshalText returns the one text form.
func (r Receipt) MarshalText() ([]byte, error) {
	var e wire.Encoder
	e.Raw(r.Lease[:])
	e.Uint32(r.Importer.PID)
	e.Raw(r.Importer.Instance[:])
	return textEncoding.AppendEncode([]byte(receiptPrefix), e.B), nil
}

// UnmarshalText reads the text form, and refuses anything else. After an error the
// receipt is unchanged.
func (r *Receipt) UnmarshalText(text []byte) error {
	const op = "handles.Receipt.UnmarshalText"
	const size = 16 + 4 + 16
	b, err := decodeText(op, text, receiptPrefix, size)
	if err != nil {
		return err
	}
	if len(b) != size {
		return errs.Peer(op, ErrDescriptor, fmt.Sprintf("%d bytes, where a receipt has %d", len(b), size), "pass the text of MarshalText")
	}
	d := wire.Decoder{B: b}
	copy(r.Lease[:], d.Raw(len(r.Lease)))
	r.Importer.PID = d.Uint32()
	copy(r.Importer.Instance[:], d.B)
	return nil
}

// ImportBuffer maps offered memory for a device, as [ReceiveBuffer] does. The
// exporter's lease must last until ImportBuffer returns; then send its receipt
// ([Offer.Receipt]). Unlike a transfer over a connection, an offer has no other handle
// type to fall back on: if the driver refuses, that is the error, with the reason as far
// as this process knows it. The files stay the caller's. The caller closes the buffer.
func ImportBuffer(d *cuda.Device, offer Offer, o ImportOptions) (*vmm.Buffer, error) {
	return importBuffer("handles.ImportBuffer", d, offer, o, Descriptor{Kind: BufferKind})
}

// ImportArray maps an offered array of elements of the same type and size
// (otherwise [ErrMismatch]). In all else it is like ImportBuffer.
func ImportArray[T any](d *cuda.Device, offer Offer, o ImportOptions) (*vmm.Array[T], error) {
	e, size := ElementOf[T]()
	b, err := importBuffer("handles.ImportArray", d, offer, o, Descriptor{Kind: ArrayKind, Element: e, ElementSize: size})
	if err != nil {
		return nil, err
	}
	a, err := vmm.ArrayOf[T](b)
	if err != nil {
		return nil, share.Of(b).Abandon("handles.ImportArray", err)
	}
	return a, nil
}

func importBuffer(op string, d *cuda.Device, offer Offer, o ImportOptions, want Descriptor) (*vmm.Buffer, error) {
	i, err := importOffer(op, d, offer, o, want)
	if err != nil {
		return nil, err
	}
	b, err := i.Buffer(share.ImportOptions{Length: offer.Descriptor.bytes(), Hint: o.Hint, Align: o.Align, Name: o.Name})
	if err != nil {
		return nil, i.Discard(err)
	}
	return b, nil
}

// importOffer imports all chunks.
func importOffer(op string, d *cuda.Device, offer Offer, o ImportOptions, want Descriptor) (*exchange.Importer, error) {
	declared := offer.Descriptor
	if err := exchange.CheckBounds(op, o.MaxBytes, o.MaxChunks, o.Align); err != nil {
		return nil, err
	}
	switch {
	case core.SystemOf(d) == nil:
		return nil, errs.PeerInvalid(op, "a nil device", "take one from System.Devices")
	case declared.Kind == 0:
		return nil, errZeroOffer(op)
	case declared.Kind != want.Kind || declared.Element != want.Element || declared.ElementSize != want.ElementSize:
		return nil, errs.Peer(op, ErrMismatch, fmt.Sprintf("the offer is of %s, where %s is imported", declared.what(), want.what()),
			"import what is offered: a buffer, or an array of the same elements")
	}
	if err := offer.check(op); err != nil {
		return nil, err
	}
	i, err := newImporter(op, d, &declared, o)
	if err != nil {
		return nil, err
	}
	if declared.Handle == vmm.Fabric {
		err = i.TakeFabric(offer.Handles)
	} else {
		err = i.Receive(offer.Files)
		if errors.Is(err, cuda.ErrClosed) {
			err = errs.Peer(op, cuda.ErrClosed, "a file of the offer, which its lease closes at its end",
				"import before the lease is closed, confirmed by all receivers, or past its deadline (LeaseOptions.Timeout)")
		}
	}
	if err != nil {
		return nil, i.Discard(err)
	}
	return i, nil
}
