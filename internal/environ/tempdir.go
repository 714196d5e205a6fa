package environ

import "os"

// TempDir returns the folder for temporary files, which no variable chooses in a program
// with raised rights.
func TempDir() string {
	if secure() {
		return "/tmp"
	}
	return os.TempDir()
}
