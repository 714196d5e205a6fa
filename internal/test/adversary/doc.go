// Package adversary attacks the library from outside: hostile peers, killed
// processes, odd files, scarce resources. Its tests speak the wire by hand, so
// that everything in it can be wrong, and then require that an honest peer is
// served as before and that nothing is left.
//
// Each test is short. CUVMM_ADVERSARY=N makes those that repeat do so N times as
// often.
package adversary
