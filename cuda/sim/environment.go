package sim

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"

	"github.com/cuvmm/cuvmm/internal/environ"
	"github.com/cuvmm/cuvmm/internal/errs"
)

// The environment variables that describe the software driver's machine if the
// program does not, as JSON: an object with the fields of [Options], and an array
// of [Fault], which are injected. Times are nanoseconds, and a UUID is an array of
// numbers. A program with raised rights (set-user-ID, file capabilities) ignores
// both.
//
//	CUVMM_SIM='{"Folder": "/dev/shm/machine", "Devices": [{"Memory": 8589934592}, {}]}'
//	CUVMM_SIM_FAULTS='[{"Call": "cuMemCreate", "After": 3, "Result": 2}]'
const (
	MachineEnv = "CUVMM_SIM"
	FaultsEnv  = "CUVMM_SIM_FAULTS"
)

const environmentOp = "sim.NewFromEnvironment"

// NewFromEnvironment makes the machine that the environment variables CUVMM_SIM
// and CUVMM_SIM_FAULTS describe; without them, that of zero Options. The caller
// closes it.
func NewFromEnvironment() (*Machine, error) {
	var o Options
	var faults []Fault
	if err := fromEnvironment(MachineEnv, &o); err != nil {
		return nil, err
	}
	if err := fromEnvironment(FaultsEnv, &faults); err != nil {
		return nil, err
	}
	for i, f := range faults {
		if wrong := f.wrong(); wrong != "" {
			return nil, errs.Invalid(environmentOp, fmt.Sprintf("fault %d of the environment variable %s: %s", i, FaultsEnv, wrong), "")
		}
	}
	m, err := New(o)
	if err != nil {
		return nil, fmt.Errorf("%w (from the environment variable %s)", err, MachineEnv)
	}
	for _, f := range faults {
		m.Inject(f)
	}
	return m, nil
}

func fromEnvironment(name string, to any) error {
	text := environ.Get(name)
	if text == "" {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader([]byte(text)))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil {
		return errs.New(errs.Failure{Op: environmentOp, Kind: errs.InvalidArgument, Asked: fmt.Sprintf("the environment variable %s is %q", name, text), Hint: "write " + form(to), Err: err})
	}
	if d.More() {
		return errs.Invalid(environmentOp, fmt.Sprintf("the environment variable %s is %q: there is more after its value", name, text), "")
	}
	return nil
}

// form describes the JSON that a variable takes: its fields by name, and theirs.
func form(to any) string {
	t, kind := reflect.TypeOf(to).Elem(), "a JSON object"
	if t.Kind() == reflect.Slice {
		t, kind = t.Elem(), "a JSON array of objects"
	}
	return fmt.Sprintf("%s with fields of %s", kind, fields(t))
}

// fields lists the fields of a struct of this package, and those of the structs in it.
func fields(t reflect.Type) string {
	var names, inside []string
	for i := range t.NumField() {
		f := t.Field(i)
		names = append(names, f.Name)
		of := f.Type
		if of.Kind() == reflect.Slice {
			of = of.Elem()
		}
		if of.Kind() == reflect.Struct {
			inside = append(inside, fmt.Sprintf(" (%s: %s)", f.Name, fields(of)))
		}
	}
	return fmt.Sprintf("sim.%s: %s%s", t.Name(), strings.Join(names, ", "), strings.Join(inside, ""))
}
