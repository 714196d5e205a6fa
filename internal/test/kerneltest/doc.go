// Package kerneltest has the tests that the library's own kernels give the same
// results on both drivers: as PTX on a GPU, as Go on the software driver.
package kerneltest
