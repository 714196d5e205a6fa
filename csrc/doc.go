// Package csrc is the real driver: internal/driver's interface over the
// vendor's libcuda.so.1, which is opened at run time.
package csrc
