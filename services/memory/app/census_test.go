// SPDX-License-Identifier: Apache-2.0

package app

import (
	"path/filepath"
	"reflect"
	"testing"

	"github.com/cloister-dev/cloister/member/signin"
	"github.com/cloister-dev/cloister/member/signin/bot"
	"github.com/cloister-dev/cloister/member/signin/scim"
	checks "github.com/cloister-dev/cloister/member/tenancy"
	"github.com/cloister-dev/cloister/member/tenancy/census"
	"github.com/cloister-dev/cloister/services/memory"
)

// item is what names one memory, with what a write adds.
var item = []string{"namespace", "key"}

func with(more ...string) []string { return append(append([]string{}, item...), more...) }

// decided is what each route, field and command of the service is for the check.
var decided = census.Table{
	Routes: map[string]census.Route{
		"POST /v1/memory.set":      {Tenants: []string{"X-Tenant"}, Others: with("value", "if_version")},
		"POST /v1/memory.get":      {Tenants: []string{"X-Tenant"}, Others: item},
		"POST /v1/memory.delete":   {Tenants: []string{"X-Tenant"}, Others: with("if_version")},
		"POST /v1/memory.list":     {Tenants: []string{"X-Tenant"}, Others: []string{"namespace", "prefix", "cursor", "limit"}},
		"POST /v1/memory.history":  {Tenants: []string{"X-Tenant"}, Others: with("before", "limit")},
		"POST /v1/memory.bulk_set": {Tenants: []string{"X-Tenant"}, Others: []string{"items", "items.namespace", "items.key", "items.value", "items.if_version"}},
		"POST /v1/memory.bulk_get": {Tenants: []string{"X-Tenant"}, Others: []string{"items", "items.namespace", "items.key"}},
		signin.PathMetadata:        {Class: checks.Free, Why: "it says where people sign in, to anybody"},
		bot.PathChallenge:          {Class: checks.Free, Why: "a bot is the cell's, and in no tenant"},
		bot.PathToken:              {Class: checks.Free, Why: "a bot is the cell's, and in no tenant"},
		"/scim/v2/":                {Class: checks.Free, Why: "what the provider may ask of the protocol"},
		"/scim/v2/Users":           {Class: checks.Free, Why: "people are the cell's, and in no tenant"},
		"/scim/v2/Groups":          {Tenants: []string{"X-Tenant"}},
		"GET /v1/events":           {Tenants: []string{"X-Tenant"}, Others: []string{"Last-Event-ID", "?after"}},
	},
	Commands: map[string]bool{"memory": false, "memory import": true},
}

// TestCensus fails for a route, a field or a command that nobody has sorted.
func TestCensus(t *testing.T) {
	store, err := memory.OpenSQLite(t.Context(), filepath.Join(t.TempDir(), "m.db"), memory.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	s := census.Service{Requests: map[string]reflect.Type{}, Parameters: map[string][]string{}, Commands: Commands("t")}
	for _, r := range memory.New(store, memory.Options{}).Routes() {
		s.Routes = append(s.Routes, r.Pattern)
		s.Parameters[r.Pattern] = r.Parameters
		if r.Request != nil {
			s.Requests[r.Pattern] = r.Request
		}
		if got := memory.Classify(nil); got != decided.Routes[r.Pattern].Class {
			t.Errorf("%s is %s for the process", r.Pattern, got)
		}
	}
	s.Routes = append(s.Routes, signin.PathMetadata, bot.PathChallenge, bot.PathToken)
	for pattern, parameters := range scim.Routes() {
		s.Routes = append(s.Routes, pattern)
		s.Parameters[pattern] = parameters
	}
	census.Check(t, s, decided)
}
