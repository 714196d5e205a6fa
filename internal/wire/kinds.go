package wire

// Kinds of messages. Those from 1 to MaxKind are the programs' own, among which the
// library uses some on connections that carry nothing else; those above are reserved
// to it on every connection.
const (
	// Greeting is the first packet of each direction.
	Greeting uint16 = 0
	// MaxKind is the largest kind of a program's message.
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
	ByFD
	// Warning says that a message is about to come. It is empty, and part of no
	// transfer.
	Warning
	// LastKind is the largest kind of a message.
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

// The processes of a group, on a connection of its own (package fabric/rendezvous).
const (
	Hello     uint16 = 0x5201 + iota // rank, size and nonce, to the host
	Welcome                          // the host's proof: the rank is a member
	Event                            // something that happened, to all ranks
	Left                             // the member leaves
	RankTaken                        // the host refuses: another process has the rank
	OtherSize                        // the host refuses: the size of its group is another
	Challenge                        // the host's nonce
	Proof                            // the member's proof
	Unproved                         // the host refuses: the proof is not of its secret
)

const (
	// MaxBody is the most bytes in a message, and MaxFDs the most descriptors.
	MaxBody = 1 << 20
	MaxFDs  = 4096
	// MaxReason is the longest reason that a process gives for ending or refusing
	// something, in bytes.
	MaxReason = 512
	// MaxBatch is the most chunks, and so descriptors, that one message of a transfer
	// or of a publication brings: few beside any limit of open files, and enough that
	// a message costs little beside its exports.
	MaxBatch = 64
)

// DescriptorHeader is the length of a descriptor of memory without chunks, in bytes.
const DescriptorHeader = 76
