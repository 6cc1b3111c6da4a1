// SPDX-License-Identifier: Apache-2.0

package census

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/tenancy"
)

type recorder struct{ failures []string }

func (r *recorder) Helper() {}
func (r *recorder) Errorf(format string, args ...any) {
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

type ref struct {
	Key string `json:"key"`
}

type write struct {
	ref
	From   string    `json:"from_tenant"`
	At     time.Time `json:"at"`
	Items  []*ref    `json:"items,omitempty"`
	Plain  int
	Hidden int `json:"-"`
	hidden int
	Self   *write `json:"self"`
}

func service() Service {
	return Service{Routes: []string{"POST /write", "GET /health"}, Requests: map[string]reflect.Type{"POST /write": reflect.TypeFor[write]()},
		Parameters: map[string][]string{"POST /write": {"?after"}},
		Commands:   []tenancy.Command{{Name: "import", Tenants: []cells.TenantID{"t"}}, {Name: "serve", Free: "each request is checked"}}}
}

func table() Table {
	return Table{Routes: map[string]Route{
		"POST /write": {Tenants: []string{"from_tenant"}, Others: []string{"key", "at", "items", "items.key", "Plain", "self", "?after"}},
		"GET /health": {Class: tenancy.Exempt, Why: "health"}}, Commands: map[string]bool{"import": true, "serve": false}}
}

func TestFields(t *testing.T) {
	_ = write{}.hidden
	if got := Fields(reflect.TypeFor[map[string][]write]()); !slices.Equal(got, []string{"Plain", "at", "from_tenant", "items", "items.key", "key", "self"}) {
		t.Error(got)
	}
}

// The census passes what is sorted, and fails each thing that is not.
func TestCheck(t *testing.T) {
	var ok recorder
	if Check(&ok, service(), table()); len(ok.failures) > 0 {
		t.Fatalf("a sorted service fails: %v", ok.failures)
	}
	set := func(t *Table, route string, change func(*Route)) {
		t.Routes = maps.Clone(t.Routes)
		r := t.Routes[route]
		r.Tenants, r.Others = slices.Clone(r.Tenants), slices.Clone(r.Others)
		change(&r)
		t.Routes[route] = r
	}
	for name, c := range map[string]struct {
		change func(*Service, *Table)
		words  string
	}{
		"new route":     {func(s *Service, _ *Table) { s.Routes = append(s.Routes, "GET /new") }, "GET /new is unclassified"},
		"old entry":     {func(s *Service, _ *Table) { s.Routes = s.Routes[:1] }, "not served"},
		"twice":         {func(s *Service, _ *Table) { s.Routes = append(s.Routes, s.Routes[0]) }, "twice"},
		"new parameter": {func(s *Service, _ *Table) { s.Parameters["POST /write"] = []string{"?after", "X-Org"} }, "X-Org is unclassified"},
		"new field":     {func(_ *Service, t *Table) { set(t, "POST /write", func(r *Route) { r.Tenants = nil }) }, "from_tenant is unclassified"},
		"nested field": {func(_ *Service, t *Table) {
			set(t, "POST /write", func(r *Route) { r.Others = slices.Delete(r.Others, 3, 4) })
		}, "items.key is unclassified"},
		"gone field": {func(_ *Service, t *Table) {
			set(t, "POST /write", func(r *Route) { r.Others = append(r.Others, "gone") })
		}, "gone is classified"},
		"field twice": {func(_ *Service, t *Table) {
			set(t, "POST /write", func(r *Route) { r.Others = append(r.Others, "from_tenant") })
		}, "classified twice"},
		"free without why": {func(_ *Service, t *Table) { set(t, "GET /health", func(r *Route) { r.Why = "" }) }, "without a reason"},
		"free with tenants": {func(_ *Service, t *Table) {
			set(t, "POST /write", func(r *Route) { r.Class, r.Why = tenancy.Free, "x" })
		}, "names a tenant"},
		"stray type":       {func(s *Service, _ *Table) { s.Requests["POST /x"] = reflect.TypeFor[ref]() }, "not served"},
		"new command":      {func(s *Service, _ *Table) { s.Commands = append(s.Commands, tenancy.Command{Name: "purge"}) }, "purge is unclassified"},
		"command declares": {func(_ *Service, t *Table) { t.Commands = map[string]bool{"import": false, "serve": false} }, "command import"},
		"silent command":   {func(s *Service, _ *Table) { s.Commands[1].Free = "" }, "declares neither"},
		"gone command":     {func(s *Service, _ *Table) { s.Commands = s.Commands[:1] }, "does not exist"},
	} {
		s, tab := service(), table()
		c.change(&s, &tab)
		var r recorder
		Check(&r, s, tab)
		if !strings.Contains(strings.Join(r.failures, "\n"), c.words) {
			t.Errorf("%s: noticed %q", name, r.failures)
		}
	}
}
