// Package adversary attacks the library from outside: hostile peers, odd files, scarce
// resources. Its tests speak the wire by hand, so that everything in it can be wrong,
// and then require that an honest peer is served as before and that nothing is left.
//
// What breaks a rule of one package is in that package's own suites: hostile publishers
// and clients, followers and publishers that are killed, pages, and who reads nothing in
// handles/publish; files that are long in closing in handles and handles/peer; killed
// ranks in fabric/rendezvous.
//
// Each test is short. CUVMM_ADVERSARY=N makes those that repeat do so N times as
// often.
package adversary
