package errs

import (
	"fmt"
	"strings"
)

// Count formats a number of things, for a noun that forms its plural with an s:
// "1 mapping", "3 mappings".
func Count[N ~int | ~int64 | ~uint64](n N, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// Bytes formats a size as a person writes it. What is no multiple of 1 KiB is in bytes.
// Other sizes are exact: in the largest unit, with up to two decimals, or in one of which
// they are whole. Only if that takes more than four digits the size is rounded down, to
// two decimals: "1.5 MiB", "2052 KiB", "255.99 MiB".
func Bytes[N ~int | ~int64 | ~uint64](n N) string {
	size, sign := uint64(n), ""
	if n < 0 {
		size, sign = -size, "-"
	}
	switch {
	case size == 1:
		return sign + "1 byte"
	case size == 0 || size%1024 != 0:
		return fmt.Sprintf("%s%d bytes", sign, size)
	}
	units := []string{"bytes", "KiB", "MiB", "GiB", "TiB", "PiB"}
	exact, parts := 0, size
	for parts%1024 == 0 && exact < len(units)-1 {
		parts, exact = parts/1024, exact+1
	}
	largest, one := exact, uint64(1)
	for parts/one >= 1024 && largest < len(units)-1 {
		largest, one = largest+1, one*1024
	}
	whole, hundredths := parts/one, parts%one*100
	switch {
	case largest == exact || hundredths%one != 0 && parts < 10000:
		return fmt.Sprintf("%s%d %s", sign, parts, units[exact])
	case hundredths%one != 0:
		return fmt.Sprintf("%s%d.%02d %s", sign, whole, hundredths/one, units[largest])
	}
	return fmt.Sprintf("%s%d.%s %s", sign, whole, strings.TrimRight(fmt.Sprintf("%02d", hundredths/one), "0"), units[largest])
}

// Name returns the name of a value of a type, or "Type(7)" for a value without one.
func Name[N ~uint8 | ~uint16 | ~int32](typ string, v N, names []string) string {
	if v >= 0 && int(v) < len(names) && names[v] != "" {
		return names[v]
	}
	return fmt.Sprintf("%s(%d)", typ, v)
}
