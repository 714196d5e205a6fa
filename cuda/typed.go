package cuda

import (
	"unsafe"

	"github.com/cuvmm/cuvmm/internal/errs"
)

// UploadOf is Stream.Upload of Go elements of a type, to an address such as that of a pool's
// block or of a mapping. Elements have a fixed size and no pointers: numbers, booleans, and
// arrays and structs of those. Their layout is Go's.
func UploadOf[T any](s *Stream, dst Ptr, src []T) error {
	if err := errs.CheckElement[T]("cuda.UploadOf"); err != nil {
		return err
	}
	return s.Upload(dst, bytesOf(src))
}

// DownloadOf is Stream.Download of Go elements of a type, as those of UploadOf.
func DownloadOf[T any](s *Stream, dst []T, src Ptr) error {
	if err := errs.CheckElement[T]("cuda.DownloadOf"); err != nil {
		return err
	}
	return s.Download(bytesOf(dst), src)
}

// bytesOf returns the memory of Go elements.
func bytesOf[T any](s []T) []byte {
	if len(s) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&s[0])), len(s)*int(unsafe.Sizeof(s[0])))
}
