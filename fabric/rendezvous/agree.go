package rendezvous

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/cuvmm/cuvmm/cuda"
	"github.com/cuvmm/cuvmm/fabric"
	"github.com/cuvmm/cuvmm/handles"
	"github.com/cuvmm/cuvmm/handles/peer"
	"github.com/cuvmm/cuvmm/vmm"
)

// Facts describe a rank to the others before memory is shared.
type Facts struct {
	// Host identifies the host: its boot id.
	Host string
	// Process is the rank's process.
	Process handles.Process
	// Device is the device whose memory it shares.
	Device cuda.UUID
	// Handles are the handle types by which it can share and import memory.
	Handles vmm.HandleTypes
	// Clique names the NVLink domain and the part of it that the device is in;
	// empty if there is none or it is unknown.
	Clique string
}

// FactsOf returns the facts of this process and a device, with the handle types that
// were found to work. If vmm.Fabric is among them, the clique comes from NVML. Without a
// device (nil) there are no handle types.
func FactsOf(d *cuda.Device, types vmm.HandleTypes) Facts {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	host := strings.TrimSpace(string(boot))
	if err != nil {
		host, _ = os.Hostname() // not on Linux, so memory is not shared anyway
	}
	f := Facts{Host: host, Process: handles.Self()}
	if d == nil {
		return f
	}
	f.Device, f.Handles = d.UUID(), types
	if types&vmm.Fabric != 0 {
		f.Clique = cliqueOf(d)
	}
	return f
}

// noCluster begins the clique of a device whose links end in its own host.
const noCluster = "00000000-0000-0000-0000-000000000000."

// cliqueOf names the set of devices of several hosts that this one reaches. It is empty
// if there is none, or it is unknown.
func cliqueOf(d *cuda.Device) string {
	found, err := fabric.Diagnose(fabric.Options{}, d)
	if err != nil || len(found.Devices) != 1 || strings.HasPrefix(found.Devices[0].Clique, noCluster) {
		return ""
	}
	return found.Devices[0].Clique
}

// Agreement is the way in which a group shares memory.
type Agreement struct {
	// Handle is vmm.Fabric or vmm.PosixFD, the same for all ranks.
	Handle vmm.HandleTypes
	// Downgrade is the reason if Handle is not vmm.Fabric.
	Downgrade string
	// Ranks are the facts of all ranks, by rank.
	Ranks []Facts
}

// Agree is a step in which the ranks settle on one handle type for all. It is
// vmm.Fabric if every rank has it and all are in one clique, or on one host and not
// known to be in different cliques. Otherwise it is vmm.PosixFD if every rank
// has it and all are on one host. Otherwise every rank gets ErrDisagree, which names the
// ranks in the way. No rank falls back alone.
func Agree(ctx context.Context, g *Group, mine Facts) (Agreement, error) {
	const name = "agree on the handle type"
	if g == nil {
		return Agreement{}, errNoGroup(name)
	}
	body, err := json.Marshal(mine)
	if err != nil {
		return Agreement{}, err
	}
	all, err := g.AllGather(ctx, name, body)
	if err != nil {
		return Agreement{}, err
	}
	a := Agreement{Ranks: make([]Facts, len(all))}
	step := g.last()
	for r, b := range all {
		if err := json.Unmarshal(b, &a.Ranks[r]); err != nil {
			err := &Error{Step: step, Ranks: []int{r}, kind: peer.ErrProtocol, Reason: "its facts are malformed: " + err.Error(), cause: err}
			g.Fail(err)
			return Agreement{}, err
		}
	}
	// All ranks compute the same from the same facts.
	noFabric := a.against(vmm.Fabric, func(q int, one, other Facts) string {
		known := one.Clique != "" && other.Clique != ""
		switch {
		case known && one.Clique == other.Clique:
		case one.Host != other.Host:
			return fmt.Sprintf("is in clique %q and rank %d in %q, on different hosts", other.Clique, q, one.Clique)
		case known:
			return fmt.Sprintf("is in clique %q and rank %d in %q, which do not reach each other", other.Clique, q, one.Clique)
		}
		return ""
	})
	if len(noFabric.ranks) == 0 {
		a.Handle = vmm.Fabric
		return a, nil
	}
	noFD := a.against(vmm.PosixFD, func(q int, one, other Facts) string {
		if one.Host != other.Host {
			return fmt.Sprintf("is on another host than rank %d", q)
		}
		return ""
	})
	if len(noFD.ranks) == 0 && g.CarriesFiles() {
		a.Handle, a.Downgrade = vmm.PosixFD, noFabric.String()
		return a, nil
	}
	if len(noFD.ranks) == 0 {
		noFD.reason = "the group carries no files"
	}
	return Agreement{}, &Error{Step: step, Ranks: noFabric.ranks, kind: ErrDisagree,
		Reason: fmt.Sprintf("no handle type serves all: fabric: %v; descriptor: %v", noFabric, noFD),
		Hint:   "see why the fabric is closed to these ranks (fabric.Diagnose), or keep the group on one host"}
}

// last returns the step that this rank called last.
func (g *Group) last() Step {
	g.mu.Lock()
	defer g.mu.Unlock()
	return Step{Number: g.state.step - min(g.state.step, 1), Name: g.asked}
}

// objection names the ranks that rule out a handle type, and the reason of the first.
type objection struct {
	ranks  []int
	reason string
}

func (o objection) String() string {
	if len(o.ranks) == 0 {
		return o.reason
	}
	return ranks(o.ranks) + ": " + o.reason
}

// against returns the ranks that lack the type, or that are apart from a lower rank.
func (a *Agreement) against(t vmm.HandleTypes, apart func(q int, one, other Facts) string) (o objection) {
	for r, f := range a.Ranks {
		why := ""
		for q := 0; q < r && why == ""; q++ {
			why = apart(q, a.Ranks[q], f)
		}
		if f.Handles&t == 0 {
			why = fmt.Sprintf("has %v alone", f.Handles)
		}
		if why != "" {
			if len(o.ranks) == 0 {
				o.reason = why
			}
			o.ranks = append(o.ranks, r)
		}
	}
	return o
}
