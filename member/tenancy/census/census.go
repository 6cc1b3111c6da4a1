// SPDX-License-Identifier: Apache-2.0

package census

import (
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/cloister-dev/cloister/member/tenancy"
)

// T is what the census needs of a test.
type T interface {
	Helper()
	Errorf(format string, args ...any)
}

// Service is what a service has, from the service itself.
type Service struct {
	// Routes are the patterns that its mux serves, or its gRPC methods.
	Routes []string
	// Requests are the types that bodies are decoded into, by route. Every exported
	// field that JSON fills is counted, in structs below them, too.
	Requests map[string]reflect.Type
	// Parameters are what else a route reads of a request (query parameters,
	// headers), by route, as the code names them.
	Parameters map[string][]string
	// Commands are its command lines that connect to the stores.
	Commands []tenancy.Command
}

// Route is what was decided about one route.
type Route struct {
	Class tenancy.Class
	// Why is required for a route that is not checked.
	Why string
	// Tenants are the fields and parameters that name a tenant; for each the route
	// must be checked, by that name.
	Tenants []string
	// Others are the fields and parameters that do not.
	Others []string
}

// Table is what was decided about a service.
type Table struct {
	Routes map[string]Route
	// Commands names each command, and whether it declares tenants.
	Commands map[string]bool
}

// Check fails t for everything in the service that the table does not have, for
// every entry of the table that the service does not have, and for decisions that
// contradict each other.
func Check(t T, s Service, table Table) {
	t.Helper()
	seen := map[string]bool{}
	for _, route := range s.Routes {
		if seen[route] {
			t.Errorf("route %s is served twice", route)
		}
		seen[route] = true
		r, ok := table.Routes[route]
		if !ok {
			t.Errorf("route %s is unclassified: is it checked, tenant-free or exempt?", route)
			continue
		}
		checkRoute(t, s, route, r)
	}
	for _, route := range slices.Sorted(maps.Keys(table.Routes)) {
		if !seen[route] {
			t.Errorf("route %s is classified and not served", route)
		}
	}
	for route := range s.Requests {
		if !seen[route] {
			t.Errorf("a request type belongs to route %s, which is not served", route)
		}
	}
	commands := map[string]bool{}
	for _, c := range s.Commands {
		commands[c.Name] = true
		declares, ok := table.Commands[c.Name]
		switch {
		case !ok:
			t.Errorf("command %s is unclassified: does it write for a tenant?", c.Name)
		case declares != (len(c.Tenants) > 0):
			t.Errorf("command %s: it is classified as declaring tenants: %t, and declares %v", c.Name, declares, c.Tenants)
		case !declares && c.Free == "":
			t.Errorf("command %s declares neither tenants nor why it writes for none", c.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(table.Commands)) {
		if !commands[name] {
			t.Errorf("command %s is classified and does not exist", name)
		}
	}
}

func checkRoute(t T, s Service, route string, r Route) {
	t.Helper()
	if r.Class != tenancy.Checked && r.Why == "" {
		t.Errorf("route %s is %s without a reason", route, r.Class)
	}
	if r.Class != tenancy.Checked && len(r.Tenants) > 0 {
		t.Errorf("route %s is %s and %v names a tenant", route, r.Class, r.Tenants)
	}
	names := slices.Clone(s.Parameters[route])
	if typ := s.Requests[route]; typ != nil {
		names = append(names, Fields(typ)...)
	}
	for _, name := range names {
		a, b := slices.Contains(r.Tenants, name), slices.Contains(r.Others, name)
		switch {
		case !a && !b:
			t.Errorf("route %s: field %s is unclassified: does it name a tenant?", route, name)
		case a && b:
			t.Errorf("route %s: field %s is classified twice", route, name)
		}
	}
	for _, name := range append(slices.Clone(r.Tenants), r.Others...) {
		if !slices.Contains(names, name) {
			t.Errorf("route %s: field %s is classified and does not exist", route, name)
		}
	}
}

// Fields lists the JSON names that a type is filled from, with the path of those in
// structs below it, sorted: "items.key". Embedded structs count as JSON has them.
func Fields(t reflect.Type) []string {
	set := map[string]bool{}
	walk(t, "", set, map[reflect.Type]bool{})
	return slices.Sorted(maps.Keys(set))
}

func walk(t reflect.Type, path string, set map[string]bool, above map[reflect.Type]bool) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice || t.Kind() == reflect.Array || t.Kind() == reflect.Map {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || above[t] || implementsUnmarshal(t) {
		return
	}
	above[t] = true
	defer delete(above, t)
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "-" && f.Tag.Get("json") == "-" {
			continue
		}
		if f.Anonymous && name == "" {
			walk(f.Type, path, set, above)
			continue
		}
		if !f.IsExported() {
			continue
		}
		if name == "" {
			name = f.Name
		}
		set[path+name] = true
		walk(f.Type, path+name+".", set, above)
	}
}

// implementsUnmarshal: such a type decides for itself what it reads, and counts as
// one field.
func implementsUnmarshal(t reflect.Type) bool {
	_, ok := reflect.PointerTo(t).MethodByName("UnmarshalJSON")
	return ok
}
