package errs

import "fmt"

// Count formats a number of things, for a noun that forms its plural with an s:
// "1 mapping", "3 mappings".
func Count[N ~int | ~int64 | ~uint64](n N, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// Bytes formats a size: exact in the largest unit that divides it, otherwise in bytes.
func Bytes[N ~int | ~int64 | ~uint64](n N) string {
	if n == 1 {
		return "1 byte"
	}
	units := []string{"bytes", "KiB", "MiB", "GiB", "TiB", "PiB"}
	u, v := 0, n
	for v != 0 && v%1024 == 0 && u < len(units)-1 {
		v, u = v/1024, u+1
	}
	return fmt.Sprintf("%d %s", v, units[u])
}
