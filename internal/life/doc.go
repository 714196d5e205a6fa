// Package life is the lifecycle of the objects that users own: a count of the
// operations that run on an object and its end ([Life]), closing that happens once and
// can be retried ([Closer]), the list of live objects ([List]), and the detection of
// objects that were lost without Close ([Watched]). It knows nothing of GPUs.
package life
