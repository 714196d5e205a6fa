package broker

import "errors"

// Kinds of errors, for errors.Is. The error itself is a [peer.Error], or a [cuda.Error] for what the
// driver refused. Failures of connections are the sentinels of package peer, and of memory those of
// package handles.
var (
	// ErrUnknown: there is no object of that name, or of that version of it. Client.Create and Client.Ensure write one.
	ErrUnknown = errors.New("no such object")
	// ErrWriting: another process is writing the object, and has not committed it, or publishes what is kept under the name.
	// AttachOptions.Wait and KeepOptions.Wait wait for it.
	ErrWriting = errors.New("being written")
	// ErrExists: there is an object of that name already (Client.Attach, Client.Remove), or a publication (Client.Keep).
	ErrExists = errors.New("there already")
	// ErrLimit: the broker's memory (Options.Limit), or this user's part of it (Quota), does not suffice, or the broker has
	// as many clients as it takes.
	ErrLimit = errors.New("limit reached")
	// ErrLost: the broker no longer has the object: it was removed, or keeper and broker ended. The
	// memory stays mapped in this process. Of Create and Keep: it was removed while it was made, so ask again.
	ErrLost = errors.New("no longer kept")
)
