package profile

import "encoding/binary"

// message is an encoded protobuf message.
type message []byte

// The wire types of fields.
const (
	varint    = 0
	delimited = 2
)

func (m *message) number(field int, n uint64) {
	if n != 0 {
		m.tag(field, varint)
		*m = binary.AppendUvarint(*m, n)
	}
}

func (m *message) bytes(field int, b []byte) {
	m.tag(field, delimited)
	*m = binary.AppendUvarint(*m, uint64(len(b)))
	*m = append(*m, b...)
}

// numbers writes a packed list.
func (m *message) numbers(field int, all []uint64) {
	var list []byte
	for _, n := range all {
		list = binary.AppendUvarint(list, n)
	}
	m.bytes(field, list)
}

func (m *message) tag(field, wire int) {
	*m = binary.AppendUvarint(*m, uint64(field)<<3|uint64(wire))
}
