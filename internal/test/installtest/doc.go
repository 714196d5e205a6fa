// Package installtest installs what the repository makes as its users do: the Go modules from
// a module proxy, the Python package by pip, the C library by pkg-config.
package installtest
