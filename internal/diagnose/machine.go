package diagnose

import (
	"fmt"
	"io/fs"
	"strings"

	"github.com/cuvmm/cuvmm/internal/imex"
)

// machine returns the findings from the device files of the channels.
func machine(f imex.Facts) []Finding {
	all := []Finding{major(f), count(f)}
	all = append(all, nodes(f)...)
	return all
}

func found(c Check, s Severity, remedy, format string, args ...any) Finding {
	return Finding{Check: c, Severity: s, Device: Machine, Text: fmt.Sprintf(format, args...), Remedy: remedy}
}

const countParameter = "load the nvidia kernel module with NVreg_ImexChannelCount=2048 or as many channels as there are to be"

func major(f imex.Facts) Finding {
	switch {
	case f.MajorErr != nil:
		return found(CheckMajor, Note, "make it readable to this process", "the major of the channels is not known: %v", f.MajorErr)
	case f.Major == 0:
		return found(CheckMajor, Problem,
			"update NVIDIA's driver, or where it is new enough "+countParameter,
			"%s lists no nvidia-caps-imex-channels: the kernel module has no IMEX channels", f.Paths.Devices)
	}
	return found(CheckMajor, OK, "", "the major of the channels is %d", f.Major)
}

func count(f imex.Facts) Finding {
	switch {
	case f.ParamsErr != nil:
		return found(CheckCount, Note, "", "the number of channels is not known: %v", f.ParamsErr)
	case f.Count < 0:
		return found(CheckCount, Note, "", "%s does not contain the number of channels", f.Paths.Params)
	case f.Count == 0:
		return found(CheckCount, Problem, countParameter, "the kernel module was loaded with ImexChannelCount 0, which turns fabric handles off")
	}
	return found(CheckCount, OK, "", "the kernel module has %d channels", f.Count)
}

// makeNode returns the remedy that creates a channel's file, and its commands.
func makeNode(f imex.Facts) (remedy string, commands []string) {
	if f.Remedy != "" {
		return f.Remedy, nil
	}
	folder, major := f.Paths.Nodes, "MAJOR"
	if f.Major != 0 {
		major = fmt.Sprint(f.Major)
	}
	steps := []string{"mkdir -p " + folder, fmt.Sprintf("mknod -m 0660 %s/channel0 c %s 0", folder, major)}
	if f.Major != 0 {
		commands = steps
	}
	return fmt.Sprintf("as root: %s, and give it to the group that may share memory; "+
		"in a container pass the file in, in Kubernetes claim a channel of the DRA driver", strings.Join(steps, " && ")), commands
}

func nodes(f imex.Facts) (all []Finding) {
	if f.ChannelsErr != nil {
		all = append(all, found(CheckNodes, Warning, "make it readable to this process", "not all channels are known: %v", f.ChannelsErr))
	}
	if len(f.Channels) == 0 {
		if f.ChannelsErr == nil {
			remedy, commands := makeNode(f)
			none := found(CheckNodes, Problem, remedy, "there is no channel in %s", f.Paths.Nodes)
			none.Commands = commands
			all = append(all, none)
		}
		return all
	}
	all = append(all, found(CheckNodes, OK, "", "%s: %s", f.Paths.Nodes, list(f.Channels)))
	var stale []imex.Channel
	for _, c := range f.Channels {
		if !f.Fits(c) && f.Major != 0 {
			stale = append(stale, c)
		}
		if c.Minor == 0 && c.Mode&0o006 != 0 {
			command := "chmod 0660 " + c.Path
			remedy := command + ", and chgrp it to the group whose users may share memory with each other"
			if f.CreateChannel0 {
				remedy += "; load the kernel module without NVreg_CreateImexChannel0, which makes it so"
			}
			open := found(CheckChannel0, Warning, remedy,
				"channel 0 is open to every user of the machine (mode %04o): each can import what the others share", c.Mode)
			open.Commands = []string{command}
			all = append(all, open)
		}
	}
	if len(stale) > 0 {
		all = append(all, found(CheckNodes, Warning, "remove them: they were made before the kernel module was loaded the last time, or by mistake",
			"not the devices that their names say, which have major %d: %s", f.Major, list(stale)))
	}
	switch open := f.Accessible(); len(open) {
	case 0:
		remedy, _ := makeNode(f)
		return append(all, found(CheckAccessible, Problem,
			"give one of them to this user or one of its groups (chown, chgrp, chmod), and let the container's device rules pass it, or "+remedy,
			"none of the channels (%d) is open to this process (user %d, group %d)", len(f.Channels), f.UID, f.GID))
	case 1:
		return append(all, found(CheckAccessible, OK, "", "channel %d is open to this process", open[0].Minor))
	default:
		return append(all, found(CheckAccessible, Warning, "leave each process the one channel that it shares with the others",
			"%d channels are open to this process, and the driver takes one of them, which may not be the others': %s", len(open), list(open)))
	}
}

// list writes the first channels with their modes and owners.
func list(channels []imex.Channel) string {
	const most = 4
	var b strings.Builder
	for i, c := range channels {
		if i == most {
			fmt.Fprintf(&b, " and %d more", len(channels)-most)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "channel%d (mode %04o, owner %d:%d", c.Minor, c.Mode&fs.ModePerm, c.UID, c.GID)
		if c.Device == [2]int{} {
			b.WriteString(", no character device")
		} else {
			fmt.Fprintf(&b, ", device %d:%d", c.Device[0], c.Device[1])
		}
		b.WriteString(")")
	}
	return b.String()
}
