package cuda

// Tag names a group of objects, for example all memory of one model. It is given to an object
// when that is made, and never changes. Errors and snapshots show it. A tag has at most 128
// bytes of printable UTF-8, without spaces at its ends; the empty Tag is none.
type Tag string
