// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

func TestOperatorCredential(t *testing.T) {
	s := newState(t)
	d := s.start(t, nil)
	other, _ := directory.NewOperatorCredential()
	paths := []string{api.PathCells, api.PathTenants, api.PathTenants + "/t", api.PathMoves, api.PathMembers, api.PathAudit, "/cells/v1/nothing", "/"}
	for _, p := range paths {
		for name, auth := range map[string]string{
			"none": "none", "another": "Bearer " + other, "prefix only": "Bearer lco_", "basic": "Basic " + credential,
			"upper case": "Bearer " + strings.ToUpper(credential), "hash": "Bearer " + credentialHash, "no scheme": credential,
		} {
			a := d.raw(http.MethodGet, p, auth, "", "")
			if a.status != http.StatusUnauthorized || a.code() != string(cells.CodeUnauthenticated) || a.header.Get("WWW-Authenticate") == "" {
				t.Errorf("%s with %s: %d %s", p, name, a.status, a.body)
			}
		}
	}
	for _, p := range []string{api.PathLive, api.PathMetrics} {
		if a := d.raw(http.MethodGet, p, "none", "", ""); a.status != http.StatusOK {
			t.Errorf("%s without a credential: %d", p, a.status)
		}
	}
	eventually(t, "ready", func() bool { return d.raw(http.MethodGet, api.PathReady, "none", "", "").status == http.StatusOK })
	d.cell("a", api.CellSpec{})
	if a := d.raw(http.MethodGet, api.PathMetrics, "none", "", ""); !strings.Contains(a.body, `cell_directory_members{cell="a",ready="true"} 0`) {
		t.Errorf("metrics lack the cell's members:\n%s", tail(a.body, 2000))
	}
	if strings.Contains(d.logged.String(), credential) || strings.Contains(d.logged.String(), other) {
		t.Error("a credential is in the log")
	}

	// Two hashes while the credential is rotated.
	fresh, freshHash := directory.NewOperatorCredential()
	d.close()
	d = s.start(t, func(c *directory.Config) { c.OperatorSHA256 = []string{credentialHash, freshHash} })
	for _, c := range []string{credential, fresh} {
		if a := d.raw(http.MethodGet, api.PathCells, "Bearer "+c, "", ""); a.status != http.StatusOK {
			t.Errorf("during the rotation: %d %s", a.status, a.body)
		}
	}
}

func TestNoOperatorCredential(t *testing.T) {
	d := newState(t).start(t, func(c *directory.Config) { c.OperatorSHA256 = nil })
	for _, auth := range []string{"none", ""} {
		a := d.raw(http.MethodGet, api.PathCells, auth, "", "")
		if a.status != http.StatusServiceUnavailable || a.code() != string(cells.CodeNoOperatorCredential) {
			t.Errorf("got %d %s", a.status, a.body)
		}
	}
}

func TestCredentialForms(t *testing.T) {
	if h, err := directory.HashOperatorCredential(credential); err != nil || h != credentialHash {
		t.Errorf("hash %s %v, want %s", h, err, credentialHash)
	}
	for _, c := range []string{"", "lco_", credential[4:], credential + "0", strings.ToUpper(credential), "lcr_" + credential[4:], credential[:len(credential)-1] + "g"} {
		if _, err := directory.HashOperatorCredential(c); err == nil || c != "" && strings.Contains(err.Error(), c) && len(c) > 8 {
			t.Errorf("credential %q: %v", c, err)
		}
	}
	d := newState(t).start(t, nil)
	for _, h := range []string{credential, credential[4:], "", strings.ToUpper(credentialHash), credentialHash + "00"} {
		_, err := directory.New(directory.Config{Store: d.store, Table: d.table, OperatorSHA256: []string{h}})
		if !errors.Is(err, cells.ErrInvalid) || h != "" && strings.Contains(err.Error(), h) {
			t.Errorf("hash %q: %v", h, err)
		}
	}
}

func TestStrictRequests(t *testing.T) {
	d := newState(t).start(t, nil)
	d.cell("a", api.CellSpec{})
	const j = "application/json"
	long := strings.Repeat("x", 300)
	for _, c := range []struct {
		name, method, path, ctype, body string
		status                          int
		code                            cells.Code
	}{
		{"unknown field", "POST", api.PathPlacements, j, `{"tenant":"t","colour":"red"}`, 400, cells.CodeBadRequest},
		{"unknown spec field", "PUT", api.PathCells + "/b", j, `{"tenants":3}`, 400, cells.CodeBadRequest},
		{"two documents", "POST", api.PathPlacements, j, `{"tenant":"t"} {}`, 400, cells.CodeBadRequest},
		{"no document", "POST", api.PathPlacements, j, ``, 400, cells.CodeBadRequest},
		{"not json", "POST", api.PathPlacements, j, `tenant=t`, 400, cells.CodeBadRequest},
		{"content type", "POST", api.PathPlacements, "text/plain", `{"tenant":"t"}`, 400, cells.CodeBadRequest},
		{"too large", "POST", api.PathPlacements, j, `{"tenant":"` + strings.Repeat("t", api.MaxBody) + `"}`, 413, cells.CodeTooLarge},
		{"bad tenant", "POST", api.PathPlacements, j, `{"tenant":"a b"}`, 400, cells.CodeInvalidTenant},
		{"no tenant", "POST", api.PathPlacements, j, `{}`, 400, cells.CodeInvalidTenant},
		{"bad cell", "POST", api.PathPlacements, j, `{"tenant":"t","cell":"A_1"}`, 400, cells.CodeBadRequest},
		{"unknown cell", "POST", api.PathPlacements, j, `{"tenant":"t","cell":"z"}`, 404, cells.CodeNotFound},
		{"long actor", "POST", api.PathPlacements, j, `{"tenant":"t","actor":"` + long + `"}`, 400, cells.CodeBadRequest},
		{"control character", "POST", api.PathPlacements, j, `{"tenant":"t","actor":"a\nb"}`, 400, cells.CodeBadRequest},
		{"long operation", "POST", api.PathMoves, j, `{"tenant":"t","to":"a","operation_id":"` + long + `"}`, 400, cells.CodeBadRequest},
		{"bad cell name", "PUT", api.PathCells + "/A_1", j, `{}`, 400, cells.CodeBadRequest},
		{"bad host", "PUT", api.PathCells + "/b", j, `{"host":"x:80"}`, 400, cells.CodeBadRequest},
		{"bad upstream", "PUT", api.PathCells + "/b", j, `{"upstream":"http://u:p@h/"}`, 400, cells.CodeBadRequest},
		{"bad state", "PUT", api.PathCells + "/b", j, `{"state":"burning"}`, 400, cells.CodeBadRequest},
		{"bad quota", "PUT", api.PathCells + "/b", j, `{"placements_max":-1}`, 400, cells.CodeBadRequest},
		{"stale revision", "PUT", api.PathCells + "/a", j, `{"revision":77}`, 409, cells.CodeConflict},
		{"absent cell", "GET", api.PathCells + "/z", "", "", 404, cells.CodeNotFound},
		{"absent tenant", "GET", api.PathTenants + "/t", "", "", 404, cells.CodeUnknownTenant},
		{"bad tenant path", "GET", api.PathTenants + "/a%20b", "", "", 400, cells.CodeInvalidTenant},
		{"delete absent", "DELETE", api.PathTenants + "/t", "", "", 404, cells.CodeUnknownTenant},
		{"move absent", "POST", api.PathMoves, j, `{"tenant":"t","to":"a"}`, 404, cells.CodeUnknownTenant},
		{"absent move", "GET", api.PathMoves + "/mv-1", "", "", 404, cells.CodeNotFound},
		{"absent move watched", "GET", api.PathMoves + "/mv-1?watch=1", "", "", 404, cells.CodeNotFound},
		{"absent move back", "POST", api.PathMoves + "/mv-1/rollback", j, `{}`, 404, cells.CodeNotFound},
		{"bad state filter", "GET", api.PathMoves + "?state=FLYING", "", "", 400, cells.CodeBadRequest},
		{"bad limit", "GET", api.PathMoves + "?limit=100000", "", "", 400, cells.CodeBadRequest},
		{"bad after", "GET", api.PathAudit + "?after=-1", "", "", 400, cells.CodeBadRequest},
		{"unknown parameter", "GET", api.PathTenants + "?colour=red", "", "", 400, cells.CodeBadRequest},
		{"repeated parameter", "GET", api.PathTenants + "?cell=a&cell=b", "", "", 400, cells.CodeBadRequest},
		{"method", "PATCH", api.PathCells + "/a", j, `{}`, 404, cells.CodeNotServed},
		{"path", "GET", "/cells/v1/secrets", "", "", 404, cells.CodeNotServed},
	} {
		a := d.raw(c.method, c.path, "", c.ctype, c.body)
		if a.status != c.status || a.code() != string(c.code) || a.header.Get("Content-Type") != cells.ProblemType ||
			a.header.Get(cells.HeaderAnswer) != string(c.code) || a.header.Get(api.HeaderRequestID) == "" {
			t.Errorf("%s: %d %s\n%s", c.name, a.status, a.code(), a.body)
		}
	}
	if _, err := d.table.Get(ctxOf(t), "t"); err == nil {
		t.Error("a refused request placed the tenant")
	}
}

func TestCellsOverTheAPI(t *testing.T) {
	d := newState(t).start(t, nil)
	ctx := ctxOf(t)
	n := int64(3)
	c := d.cell("a", api.CellSpec{Host: "A.example.", Issuers: []string{"https://id"}, PlacementsMax: &n, Default: true})
	if c.Host != "a.example" || c.State != api.CellServing || *c.PlacementsMax != 3 {
		t.Errorf("cell %+v", c)
	}
	_, err := d.cl.PutCell(ctx, "b", api.CellSpec{Host: "a.example"})
	wantCode(t, err, cells.CodeConflict)
	_, err = d.cl.PutCell(ctx, "b", api.CellSpec{Default: true})
	wantCode(t, err, cells.CodeConflict)
	c, err = d.cl.PutCell(ctx, "a", c.CellSpec)
	if err != nil {
		t.Fatal(err)
	}
	list, err := d.cl.Cells(ctx)
	if err != nil || len(list) != 1 || list[0].Revision != c.Revision {
		t.Errorf("list %+v, %v", list, err)
	}
	_, err = d.cl.Cell(ctx, "z")
	wantCode(t, err, cells.CodeNotFound)
}

func TestAuditSaysWhoDidWhat(t *testing.T) {
	d := newState(t).start(t, nil)
	ctx := ctxOf(t)
	d.cell("a", api.CellSpec{})
	d.cell("b", api.CellSpec{})
	d.place("t", "a")
	m := d.move("t", "b")
	d.untilState(m.ID, api.MoveDone)
	if _, err := d.cl.DeleteTenant(ctx, "t", "bob"); err != nil {
		t.Fatal(err)
	}
	list, err := d.cl.Audit(ctx, client.AuditQuery{Tenant: "t"})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range list.Entries {
		got = append(got, fmt.Sprintf("%s %s %s %s", e.Action, e.Peer, e.Actor, e.Cell))
		if e.RequestID == "" || time.Since(e.At) > time.Minute {
			t.Errorf("entry %+v", e)
		}
	}
	want := "tenant.delete operator bob b|move.create operator alice b|placement.reserve operator alice a"
	if strings.Join(got, "|") != want {
		t.Errorf("audit %v, want %s", got, want)
	}
	a := d.raw("GET", api.PathCells, "", "", "")
	if a.header.Get(api.HeaderRequestID) == "" {
		t.Error("no request id")
	}
	page, err := d.cl.Audit(ctx, client.AuditQuery{Limit: 2})
	if err != nil || len(page.Entries) != 2 || page.Next == 0 {
		t.Errorf("page %+v, %v", page, err)
	}
	rest, err := d.cl.Audit(ctx, client.AuditQuery{After: page.Next})
	if err != nil || len(rest.Entries) != 3 || rest.Next != 0 {
		t.Errorf("rest %+v, %v", rest, err)
	}
}
