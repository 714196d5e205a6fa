package drivertest

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cuvmm/cuvmm/internal/driver"
	"github.com/cuvmm/cuvmm/internal/test/reexec"
)

// roles are what a case may have done in another process.
var roles = map[string]func(c *child){}

// child is another process at work for a case. Its methods end the role where
// they fail.
type child struct {
	*reexec.Child
	d driver.Driver
	// undo gives back what the role took, last first.
	undo []func()
}

// RegisterChild names a function that opens a driver in another process: the
// one that Env.Driver is in this process, or another on the same machine. It is
// called from an init function of the package that calls Run.
func RegisterChild(name string, open func(args []string) (driver.Driver, error)) {
	reexec.Register(name, func(r *reexec.Child) (err error) {
		d, err := open(r.Args[1:])
		if err != nil {
			return err
		}
		if r := d.Init(); r != driver.Success {
			return fmt.Errorf("cuInit: %v", r)
		}
		c := &child{Child: r, d: d}
		defer func() {
			switch r := recover().(type) {
			case nil:
			case failure:
				err = r.error
			default:
				panic(r)
			}
		}()
		roles[r.Args[0]](c)
		for i := len(c.undo) - 1; i >= 0; i-- {
			c.undo[i]()
		}
		return nil
	})
}

// child prepares a process that plays a role.
func (e Env) child(t testing.TB, role string) *reexec.Cmd {
	t.Helper()
	if roles[role] == nil {
		t.Fatalf("no role %q", role)
	}
	return reexec.Command(t, e.Child, append([]string{role}, e.ChildArgs...)...)
}

func (t *T) child(role string) *reexec.Cmd {
	t.Helper()
	return t.env.child(t, role)
}

type failure struct{ error }

func (c *child) check(err error) {
	if err != nil {
		panic(failure{err})
	}
}

func (c *child) send(v any) { c.check(c.Send(v)) }
func (c *child) recv(v any) { c.check(c.Recv(v)) }

// ok ends the role where the driver did not succeed.
func (c *child) ok(r driver.Result, what string) {
	if r != driver.Success {
		c.check(fmt.Errorf("child: %s: %v", what, r))
	}
}

// later gives something back at the end of the role.
func (c *child) later(what string, f func() driver.Result) {
	c.undo = append(c.undo, func() { c.ok(f(), what) })
}

// device is one of the machine's devices, with its primary context.
func (c *child) device(ordinal int32) (driver.Device, driver.Context) {
	dev, r := c.d.DeviceGet(ordinal)
	c.ok(r, "cuDeviceGet")
	ctx, r := c.d.DevicePrimaryCtxRetain(dev)
	c.ok(r, "cuDevicePrimaryCtxRetain")
	c.later("cuDevicePrimaryCtxRelease", func() driver.Result { return c.d.DevicePrimaryCtxRelease(dev) })
	return dev, ctx
}

var errContents = errors.New("child: the memory holds other bytes")
