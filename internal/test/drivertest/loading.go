package drivertest

import (
	"github.com/cuvmm/cuvmm/internal/driver"
)

// ptxHead and ptxBody make a module that every driver loads. The software driver
// has a function for the kernel.
const (
	ptxHead = ".version 7.0\n.target sm_50\n.address_size 64\n"
	ptxBody = ".visible .entry " + NothingKernel + "() { ret; }\n"
)

// loading are the rules of what text is a module.
var loading = []Case{
	{
		Name: "cuModuleLoadDataEx of PTX whose version there is not yet, or is no pair of numbers",
		Says: "UNSUPPORTED_PTX_VERSION (222); INVALID_PTX",
		Run: loads([]text{
			{"a later version", ".version 99.0\n.target sm_70\n" + ptxBody, driver.UnsupportedPTX},
			{"a version without a minor one", ".version 7\n.target sm_70\n" + ptxBody, driver.InvalidPTX},
			{"two versions", ".version 7.0\n" + ptxHead + ptxBody, driver.InvalidPTX},
		}),
	},
	{
		Name: "the same of PTX that does not begin with its version",
		Says: "INVALID_IMAGE (200)",
		Run: loads([]text{
			{"no version", ".target sm_70\n" + ptxBody, driver.InvalidImage},
			{"the target first", ".target sm_70\n.version 7.0\n" + ptxBody, driver.InvalidImage},
			{"words", "words\n", driver.InvalidImage},
		}),
	},
	{
		Name: "the same of PTX without a target, and for a later device",
		Says: "INVALID_PTX",
		Run: loads([]text{
			{"no target", ".version 7.0\n" + ptxBody, driver.InvalidPTX},
			{"no target nor anything else", ".version 7.0\n", driver.InvalidPTX},
			{"a target that there is not", ".version 7.0\n.target sm_999\n" + ptxBody, driver.InvalidPTX},
		}),
	},
	{
		Name: "the same of PTX that is cut short, has a brace too many, or words between its directives",
		Says: "INVALID_PTX",
		Run: loads([]text{
			{"an entry without an end", ptxHead + ".visible .entry k() { ret;\n", driver.InvalidPTX},
			{"parameters without an end", ptxHead + ".visible .entry k(.param .u64 p { ret; }\n", driver.InvalidPTX},
			{"an entry cut behind its name", ptxHead + ".visible .entry k", driver.InvalidPTX},
			{"an entry cut behind its parameters", ptxHead + ".visible .entry k()", driver.InvalidPTX},
			{"a statement without an end", ptxHead + ".visible .entry k() { ret }\n", driver.InvalidPTX},
			{"an empty parameter", ptxHead + ".visible .entry k(.param .u64 p,) { ret; }\n", driver.InvalidPTX},
			{"a function without an end", ptxHead + ptxBody + ".func f() { ret;\n", driver.InvalidPTX},
			{"a comment without an end", ptxHead + ptxBody + "/* and so on\n", driver.InvalidPTX},
			{"a brace too many", ptxHead + ptxBody + "}\n", driver.InvalidPTX},
			{"words", ptxHead + ptxBody + "words\n", driver.InvalidPTX},
			{"an entry twice", ptxHead + ptxBody + ptxBody, driver.InvalidPTX},
		}),
	},
	{
		Name: "the same of PTX without an entry, and without an address size",
		Says: "success",
		Run: loads([]text{
			{"no entry", ptxHead, driver.Success},
			{"no address size", ".version 7.0\n.target sm_50\n" + ptxBody, driver.Success},
		}),
	},
}

// text is PTX, and what loading it returns.
type text struct {
	what, ptx string
	want      driver.Result
}

// loads returns a case that loads each text.
func loads(texts []text) func(t *T) {
	return func(t *T) {
		for _, row := range texts {
			log := make([]byte, 4096)
			m, r := t.D.ModuleLoadDataEx(t.ctx, []byte(row.ptx), log)
			t.returns(row.want, r, "%s", row.what)
			if r == driver.Success {
				t.ok(t.D.ModuleUnload(t.ctx, m), "unload")
			}
		}
	}
}
