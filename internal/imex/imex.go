// Package imex reads what the operating system reports of IMEX channels: the
// device files that decide which users may share GPU memory over a fabric. It only
// reads, and opens no channel: a process that has opened one belongs to it.
package imex

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Paths are where the facts lie. An empty one is the usual place.
type Paths struct {
	// Devices is the kernel's list of device majors, /proc/devices.
	Devices string
	// Params are the kernel module's parameters, /proc/driver/nvidia/params.
	Params string
	// Nodes is the folder of the channels' device files.
	Nodes string
}

// Defaults fills in the usual places.
func (p Paths) Defaults() Paths {
	set := func(to *string, usual string) {
		if *to == "" {
			*to = usual
		}
	}
	set(&p.Devices, "/proc/devices")
	set(&p.Params, "/proc/driver/nvidia/params")
	set(&p.Nodes, "/dev/nvidia-caps-imex-channels")
	return p
}

// Channel is a channel's device file.
type Channel struct {
	// Minor is the channel's number, from the file's name.
	Minor int
	Path  string
	// Mode are the permission bits.
	Mode     fs.FileMode
	UID, GID int
	// Device is the file's device as major and minor; 0, 0 where it is no
	// character device.
	Device [2]int
	// Readable and Writable say whether this process may open it so, the
	// container's device rules included.
	Readable, Writable bool
}

// Accessible reports whether this process may open the channel.
func (c Channel) Accessible() bool { return c.Readable && c.Writable }

// Facts are what was found. What could not be read has its error.
type Facts struct {
	Paths Paths
	// Major is the character device major of the channels. It is 0 where the
	// kernel lists none.
	Major    int
	MajorErr error
	// Count is how many channels the kernel module has, CreateChannel0 whether
	// it makes the file of channel 0 itself, open to everybody. Both are its
	// parameters; Count is -1 where they do not tell.
	Count          int
	CreateChannel0 bool
	ParamsErr      error
	// Channels are in the order of their numbers.
	Channels    []Channel
	ChannelsErr error
	// UID and GID are this process's effective ones.
	UID, GID int
	// Remedy is how a channel is opened where it is not by a device file.
	Remedy string
}

// Source is a driver that stands for a machine of its own, whose channels are
// not those of the operating system.
type Source interface{ IMEX() Facts }

const driverName = "nvidia-caps-imex-channels"

// Read reads the facts. Paths that are empty are the usual ones.
func Read(p Paths) Facts {
	p = p.Defaults()
	f := Facts{Paths: p, Count: -1, UID: os.Geteuid(), GID: os.Getegid()}
	f.Major, f.MajorErr = readMajor(p.Devices)
	f.ParamsErr = f.readParams(p.Params)
	f.Channels, f.ChannelsErr = readChannels(p.Nodes)
	return f
}

// Accessible are the channels that this process may open.
func (f Facts) Accessible() []Channel {
	return slices.DeleteFunc(slices.Clone(f.Channels), func(c Channel) bool { return !c.Accessible() || !f.Fits(c) })
}

// Fits reports whether the file is the device that its name says. A major may
// change when the kernel module is loaded again, and a file that was made
// before then names nothing, or something else. Where the major is not known
// any will do.
func (f Facts) Fits(c Channel) bool {
	return c.Device[0] != 0 && c.Device[1] == c.Minor && (f.Major == 0 || c.Device[0] == f.Major)
}

// eachLine reads a file line by line, until the function returns false. Another
// path may lead to anything, a pipe without a writer included.
func eachLine(path string, do func(line string) bool) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is no plain file", path)
	}
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		if !do(lines.Text()) {
			return nil
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// readMajor looks among the character devices. A block device of that name
// would be another thing.
func readMajor(path string) (major int, err error) {
	character := false
	var bad error
	err = eachLine(path, func(line string) bool {
		line = strings.TrimSpace(line)
		if strings.HasSuffix(line, ":") {
			character = line == "Character devices:"
			return true
		}
		number, name, ok := strings.Cut(line, " ")
		if !ok || !character || strings.TrimSpace(name) != driverName {
			return true
		}
		n, err := strconv.Atoi(number)
		if err != nil || n <= 0 {
			bad = fmt.Errorf("%s: the line %q has no major", path, line)
			return false
		}
		major = n
		return false
	})
	if err = cmp.Or(err, bad); err != nil {
		return 0, fmt.Errorf("reading the device majors: %w", err)
	}
	return major, nil
}

func (f *Facts) readParams(path string) error {
	err := eachLine(path, func(line string) bool {
		name, value, _ := strings.Cut(line, ":")
		n, err := strconv.ParseUint(strings.TrimSpace(value), 10, 32)
		if err != nil {
			return true // others' parameters may be text
		}
		switch strings.TrimSpace(name) {
		case "ImexChannelCount":
			f.Count = int(n)
		case "CreateImexChannel0":
			f.CreateChannel0 = n != 0
		}
		return true
	})
	if err != nil {
		return fmt.Errorf("reading the kernel module's parameters: %w", err)
	}
	return nil
}

// readChannels lists the files channelN; a missing folder has none. It returns the first
// error of a file that it cannot read, with all other channels.
func readChannels(folder string) ([]Channel, error) {
	entries, err := os.ReadDir(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing the channels: %w", err)
	}
	var channels []Channel
	var first error
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), "channel")
		minor, err := strconv.ParseUint(number, 10, 31)
		if !ok || err != nil || strconv.FormatUint(minor, 10) != number {
			continue
		}
		c := Channel{Minor: int(minor), Path: filepath.Join(folder, e.Name())}
		if err := c.inspect(); err != nil {
			first = cmp.Or(first, fmt.Errorf("looking at a channel: %w", err))
			continue
		}
		channels = append(channels, c)
	}
	slices.SortFunc(channels, func(a, b Channel) int { return a.Minor - b.Minor })
	return channels, first
}
