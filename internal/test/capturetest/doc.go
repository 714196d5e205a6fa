// Package capturetest holds one promise to account: no public operation of this
// library ends a stream capture that another library has under way, in whatever
// mode and on whatever thread. On the same objects it sees that no operation
// panics where it is passed nil (nil_test.go).
//
// Its tests have a case for each exported function and method of the packages
// that programs use, and read those from the sources, where they are at hand: a
// new operation without a case fails. The cases of a package are in the file
// that is named after it; a new package adds its table to the list of tables.
package capturetest
