package wire

// Kinds of messages. Kinds from 1 to MaxKind belong to programs; the library uses some of
// them on connections that carry nothing else. Higher kinds are reserved on every
// connection.
const (
	// Greeting is the first packet of each direction.
	Greeting uint16 = 0
	// MaxKind is the highest kind of a program's message.
	MaxKind uint16 = 0xff00
	// Refusal is the last packet of a connection, with the reason.
	Refusal uint16 = 0xffff
)

// Transfers of memory, on any connection (package handles).
const (
	Offer uint16 = MaxKind + 1 + iota
	Chunks
	Withdrawn
	Confirmed
	Taken
	Mapped
	Declined
	Fabric
	// Warning announces that a message follows soon. It is empty, and not part of a
	// transfer.
	Warning
	// LastKind is the highest kind of a message.
	LastKind = Warning
)

// Publishing: to the server, on a connection of its own (package handles/publish).
const (
	List uint16 = 0xf101 + iota
	Follow
	Done
	Leave
)

// Publishing: to the client.
const (
	Listing uint16 = 0xf181 + iota
	Accepted
	Denied
	View
)

// A keeper and the process that it keeps for, on a connection of their own (package
// handles/broker/keeper).
const (
	KeepWrite   uint16 = 0xb001 + iota // an entry
	KeepFiles                          // further files of it
	KeepDrop                           // a key
	KeepAll                            // asks for all entries
	KeepDone                           // the request is done
	KeepRefused                        // why it is not
)

// A broker: to it, on a connection of its own, beside transfers (package handles/broker).
const (
	BrokerHello   uint16 = 0xb101 + iota // the client's number
	BrokerCreate                         // an object to write
	BrokerCommit                         // it is written; its manifest
	BrokerAttach                         // an object by name
	BrokerHold                           // the client has the object
	BrokerRelease                        // and no longer
	BrokerRemove                         // objects by name
	BrokerList                           // the objects that there are
	BrokerAwait                          // until a name is sealed, or nobody writes it
	BrokerCancel                         // the end of such a wait
	BrokerAsk                            // how the broker is
	BrokerKeep                           // memory to publish
)

// A broker: to its client.
const (
	BrokerDone    uint16 = 0xb181 + iota // the request is done
	BrokerDenied                         // why it is not
	BrokerObject                         // the object whose memory follows as a transfer
	BrokerListing                        // some of the objects
	BrokerWanted                         // the memory of an object that the client holds is wanted
	BrokerStatus                         // how it is
)

// The processes of a group, on a connection of its own (package fabric/rendezvous).
const (
	Hello     uint16 = 0x5201 + iota // rank and size, to the host
	Welcome                          // the rank is a member
	Event                            // an event of a rank, in the order of all
	Left                             // the member leaves
	RankTaken                        // the host refuses: another process has the rank
	OtherSize                        // the host refuses: its group has another size
)

const (
	// MaxBody bounds the bytes of a message, and MaxFDs its descriptors.
	MaxBody = 1 << 20
	MaxFDs  = 4096
	// MaxReason bounds the reason of a refusal or of an end, in bytes.
	MaxReason = 512
	// MaxBatch bounds the chunks, and so the descriptors, of one message of a transfer
	// or publication: few compared with any limit of open files, and enough that
	// a message costs little compared with its exports.
	MaxBatch = 64
)

// DescriptorHeader is the length of a descriptor of memory without chunks, in bytes.
const DescriptorHeader = 76
