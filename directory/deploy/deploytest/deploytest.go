// SPDX-License-Identifier: Apache-2.0

// Package deploytest is the conformance suite of [deploy.Store]. Every implementation
// passes [Run] against the real thing. A case fails through [directorytest.TB], so the
// suite can be run against broken stores and seen to fail.
package deploytest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/directorytest"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// Directory is what a store of deployments is part of.
type Directory interface {
	Deployments() deploy.Store
	Audit(ctx context.Context, f directory.AuditFilter) ([]api.AuditEntry, error)
	Close() error
}

// Harness gives one case its store.
type Harness struct {
	// Open opens the case's directory; each call is another handle on the same records.
	// The suite closes what it opens.
	Open func(ctx context.Context) (Directory, error)
}

// Case is one requirement.
type Case struct {
	Name string
	Run  func(t directorytest.TB, h Harness)
}

// Run runs all cases; newHarness is called once for each of them.
func Run(t *testing.T, newHarness func(t *testing.T) Harness) {
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) { c.Run(t, newHarness(t)) })
	}
}

// Cases returns the suite.
func Cases() []Case {
	return []Case{
		{"CellsRoundTrip", cellsRoundTrip},
		{"KindIsSettledOnce", kindIsSettledOnce},
		{"RefusedChangesWriteNothing", refusedChangesWriteNothing},
		{"ChangesAreAlone", changesAreAlone},
		{"AuditFollowsChanges", auditFollowsChanges},
		{"PlaceOneWinner", placeOneWinner},
		{"PlaceReadsBackWhateverTheCell", placeReadsBack},
		{"PlaceGate", placeGate},
		{"QuotaUnderConcurrency", quotaUnderConcurrency},
		{"PlaceTogether", placeTogether},
		{"AttachPlacesBeyondTheQuota", attachPlacesBeyondTheQuota},
		{"AttachRefusesTenantsOfOthers", attachRefusesTenantsOfOthers},
		{"PinnedNeverChanges", pinnedNeverChanges},
		{"MovableFollowsMoves", movableFollowsMoves},
		{"MovesHaveTheirPlace", movesHaveTheirPlace},
		{"PlacementPages", placementPages},
	}
}

// At is when everything of the suite happens.
var At = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)

// Hash makes a credential's hash for tests out of a character.
func Hash(c string) string { return strings.Repeat(c, 64) }

// Fingerprint is a configuration of a cell of the suite.
func Fingerprint(cell, host string, tenants ...cells.TenantID) tenancy.Fingerprint {
	f, err := tenancy.Config{PublicBaseURL: "https://" + host, BearerIssuers: []string{"https://iss." + cell}, Tenants: tenants,
		DeploymentID: "dep-" + cell, Bucket: "bucket", Prefix: cell}.Fingerprint()
	if err != nil {
		panic(err) // the suite's own values are good
	}
	return f
}

// First and Later are registrations of the suite.
func First(name string) deploy.Registration {
	return deploy.Registration{First: true, Host: "app.example.com", Aliases: []string{"www.example.com"}, Upstream: "http://10.0.0.1:80",
		ProbeURL: "http://10.0.0.1:9000", Stores: deploy.Stores{DeploymentID: "dep-" + name, Bucket: "bucket", Prefix: name}, CredentialHash: Hash("a")}
}

// Later is the registration of a cell beside the first.
func Later(name, hash string) deploy.Registration {
	return deploy.Registration{Host: name + ".example.com", ProbeURL: "http://10.0.1.1:9000",
		Stores: deploy.Stores{DeploymentID: "dep-" + name, Bucket: "bucket", Prefix: name}, CredentialHash: Hash(hash)}
}

func audit(action string) api.AuditEntry {
	return api.AuditEntry{At: At, Peer: "operator", Actor: "alice", RequestID: "r-" + action, Action: action}
}

type env struct {
	directorytest.TB
	ctx context.Context
	h   Harness
	dir Directory
	s   deploy.Store
}

func start(t directorytest.TB, h Harness) *env {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	e := &env{TB: t, ctx: ctx, h: h}
	e.dir = e.open()
	e.s = e.dir.Deployments()
	return e
}

func (e *env) open() Directory {
	e.Helper()
	d, err := e.h.Open(e.ctx)
	if err != nil {
		e.Fatalf("open: %v", err)
	}
	e.Cleanup(func() { _ = d.Close() })
	return d
}

func (e *env) must(err error) {
	e.Helper()
	if err != nil {
		e.Fatalf("unexpected error: %v", err)
	}
}

func (e *env) refused(err, want error, what string) {
	e.Helper()
	if !errors.Is(err, want) {
		e.Errorf("%s: %v, want %v", what, err, want)
	}
}

func (e *env) change(cell cells.CellID, rule deploy.Rule) (deploy.Cell, error) {
	return e.s.Change(e.ctx, cell, rule, audit("cell.change"))
}

func (e *env) mustChange(cell cells.CellID, rules ...deploy.Rule) (c deploy.Cell) {
	e.Helper()
	for _, r := range rules {
		var err error
		c, err = e.change(cell, r)
		e.must(err)
	}
	return c
}

// first makes a first cell that serves; later another one.
func (e *env) first(name string, held ...cells.TenantID) {
	e.Helper()
	e.mustChange(cells.CellID(name), deploy.Register(First(name)),
		deploy.Attach(deploy.Attachment{Current: Fingerprint(name, "app.example.com"), KeysFP: "keys-" + name, Tenants: held}),
		deploy.RaiseMode(tenancy.Enforced), deploy.Serve())
}

func (e *env) later(name, hash string, configured ...cells.TenantID) {
	e.Helper()
	e.mustChange(cells.CellID(name), deploy.Register(Later(name, hash)), deploy.Attach(attachment(name, configured...)), deploy.Serve())
}

func attachment(name string, configured ...cells.TenantID) deploy.Attachment {
	return deploy.Attachment{Current: Fingerprint(name, name+".example.com", configured...), KeysFP: "keys-" + name, Upstream: "http://10.0.1.1:80"}
}

func call(cell, hash string, tenant cells.TenantID) deploy.Call {
	host := "app.example.com"
	if cell != "one" {
		host = cell + ".example.com"
	}
	f := Fingerprint(cell, host)
	return deploy.Call{Tenant: tenant, Cell: cells.CellID(cell), By: deploy.ByCell, CredentialHash: Hash(hash), Fingerprint: &f, At: At}
}

func (e *env) place(c deploy.Call) (deploy.Placement, bool, error) {
	return e.s.Place(e.ctx, c, audit("placement"))
}

func (e *env) view() deploy.View {
	e.Helper()
	v, err := e.s.Read(e.ctx)
	e.must(err)
	return v
}

func (e *env) count(cell cells.CellID) int64 {
	e.Helper()
	v := e.view()
	if c := v.Cell(cell); c != nil {
		return c.Placements
	}
	e.Fatalf("cell %s is not there", cell)
	return 0
}

func (e *env) audits(action string) int {
	e.Helper()
	n := 0
	for after := int64(0); ; {
		list, err := e.dir.Audit(e.ctx, directory.AuditFilter{After: after, Limit: 1000})
		e.must(err)
		for _, a := range list {
			if a.Action == action {
				n++
			}
			after = a.Seq
		}
		if len(list) < 1000 {
			return n
		}
	}
}

func tenant(n int) cells.TenantID { return cells.TenantID(fmt.Sprintf("t-%04d", n)) }
