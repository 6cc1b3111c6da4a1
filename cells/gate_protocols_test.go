// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"context"
	"fmt"
	"net/http"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

var admissionKey = []byte("an admission key of the test....")

// A fault of an earlier library: HTTP requests passed where gRPC calls were
// refused. Every refusal, through HTTP, unary calls and streams, on real sockets.
func TestRefusalsAreTheSameOverHTTPAndGRPC(t *testing.T) {
	noLeaks(t)
	const T, E, A = cells.HeaderTenant, cells.HeaderEpoch, cells.HeaderAdmission
	mint := func(tenant cells.TenantID, cell cells.CellID, epoch cells.Epoch) string {
		return cells.MintToken(admissionKey, tenant, cell, epoch)
	}
	type setup struct {
		table  *faultTable
		opts   []cells.GateOption
		noLoad bool
	}
	withKey := func(s *setup) {
		s.opts = append(s.opts, cells.WithAdmissionKey(admissionKey))
	}
	opener := func(err error) func(*setup) {
		return func(s *setup) {
			s.opts = append(s.opts, cells.WithOpener(func(context.Context, cells.FenceOrder) error { return err }))
		}
	}
	down := func(s *setup) { s.table.down = cells.ErrUnavailable }

	for _, c := range []struct {
		name  string
		setup func(*setup) // before the router starts
		late  func(*setup) // after it has
		send  http.Header
		code  cells.Code // "" is admitted
		epoch string
	}{
		{name: "no epoch", send: hdr(T, "acme"), epoch: "4"},
		{name: "this epoch", send: hdr(T, "acme", E, "4"), epoch: "4"},
		{name: "above the floor", send: hdr(T, "floor", E, "5"), epoch: "7"},
		{name: "at the floor", send: hdr(T, "floor", E, "4"), epoch: "7"},
		{name: "below the floor", send: hdr(T, "floor", E, "3"), code: cells.CodeStaleRoute},
		{name: "default cell", send: hdr(T, "nobody", E, "0"), epoch: "0"},
		{name: "default cell, no epoch", send: hdr(T, "nobody"), epoch: "0"},
		{name: "prepared", send: hdr(T, "preparing", E, "4"), epoch: "4"},
		{name: "no tenant", send: hdr(E, "4"), code: cells.CodeInvalidTenant},
		{name: "empty tenant", send: hdr(T, ""), code: cells.CodeInvalidTenant},
		{name: "malformed tenant", send: hdr(T, "a/b"), code: cells.CodeInvalidTenant},
		{name: "epoch is no number", send: hdr(T, "acme", E, "four"), code: cells.CodeBadRequest},
		{name: "epoch with a sign", send: hdr(T, "acme", E, "+4"), code: cells.CodeBadRequest},
		{name: "epoch with a zero", send: hdr(T, "acme", E, "04"), code: cells.CodeBadRequest},
		{name: "epoch too large", send: hdr(T, "acme", E, "18446744073709551616"), code: cells.CodeBadRequest},
		{name: "epoch empty", send: hdr(T, "acme", E, ""), code: cells.CodeBadRequest},
		{name: "two tenants", send: hdr(T, "acme", T, "bolt"), code: cells.CodeBadRequest},
		{name: "one tenant twice", send: hdr(T, "acme", T, "acme"), code: cells.CodeBadRequest},
		{name: "two epochs", send: hdr(T, "acme", E, "4", E, "5"), code: cells.CodeBadRequest},
		{name: "two tokens", send: hdr(T, "acme", A, "x", A, "y"), code: cells.CodeBadRequest},
		{name: "two answers", send: hdr(T, "acme", cells.HeaderAnswer, "x", cells.HeaderAnswer, "y"), code: cells.CodeBadRequest},
		{name: "tombstone", send: hdr(T, "gone", E, "2"), code: cells.CodeUnknownTenant},
		{name: "being deleted", send: hdr(T, "leaving"), code: cells.CodeUnknownTenant},
		{name: "another cell", send: hdr(T, "bolt", E, "2"), code: cells.CodeWrongCell},
		{name: "another cell, older", send: hdr(T, "bolt", E, "1"), code: cells.CodeWrongCell},
		{name: "another cell, no epoch", send: hdr(T, "bolt"), code: cells.CodeWrongCell},
		{name: "QUIESCING", send: hdr(T, "quiescing", E, "4"), code: cells.CodeMoving},
		{name: "DRAINING", send: hdr(T, "draining", E, "4"), code: cells.CodeMoving},
		{name: "COPYING", send: hdr(T, "copying", E, "4"), code: cells.CodeMoving},
		{name: "COMMITTING here", send: hdr(T, "committing", E, "6"), code: cells.CodeMoving},
		{name: "COMMITTING there", send: hdr(T, "committed", E, "4"), code: cells.CodeWrongCell},
		{name: "older", send: hdr(T, "acme", E, "3"), code: cells.CodeStaleRoute},
		{name: "newer than the table", send: hdr(T, "acme", E, "5"), code: cells.CodeBackendUnavailable},
		{name: "newer, table is down", late: down, send: hdr(T, "acme", E, "5"), code: cells.CodeBackendUnavailable},
		{name: "routed, but there is no row", send: hdr(T, "nobody", E, "3"), code: cells.CodeStaleRoute},
		{name: "view is good though the table is down", late: down, send: hdr(T, "acme", E, "4"), epoch: "4"},
		{name: "nothing loaded", setup: func(s *setup) { s.noLoad = true; down(s) }, send: hdr(T, "acme", E, "4"), code: cells.CodeBackendUnavailable},
		{name: "nothing loaded, no epoch", setup: func(s *setup) { s.noLoad = true }, send: hdr(T, "acme"), code: cells.CodeBackendUnavailable},
		{name: "nothing loaded, but the row can be read", setup: func(s *setup) { s.noLoad = true }, send: hdr(T, "acme", E, "4"), epoch: "4"},
		{name: "fence cannot be opened", setup: opener(fmt.Errorf("%w: no connection", cells.ErrUnavailable)), send: hdr(T, "acme", E, "4"), code: cells.CodeBackendUnavailable},
		{name: "fence is further", setup: opener(cells.ErrStaleOrder), send: hdr(T, "acme", E, "4"), code: cells.CodeStaleRoute},
		{name: "fence was opened", setup: opener(nil), send: hdr(T, "acme", E, "4"), epoch: "4"},
		{name: "token", setup: withKey, send: hdr(T, "acme", E, "4", A, mint("acme", "cell-a", 4)), epoch: "4"},
		{name: "no token", setup: withKey, send: hdr(T, "acme", E, "4"), code: cells.CodeBadRequest},
		{name: "token without epoch", setup: withKey, send: hdr(T, "acme", A, mint("acme", "cell-a", 0)), code: cells.CodeBadRequest},
		{name: "token of another tenant", setup: withKey, send: hdr(T, "acme", E, "4", A, mint("bolt", "cell-a", 4)), code: cells.CodeBadRequest},
		{name: "token of another cell", setup: withKey, send: hdr(T, "acme", E, "4", A, mint("acme", "cell-b", 4)), code: cells.CodeBadRequest},
		{name: "token of another epoch", setup: withKey, send: hdr(T, "acme", E, "4", A, mint("acme", "cell-a", 3)), code: cells.CodeBadRequest},
		{name: "token of another key", setup: withKey, send: hdr(T, "acme", E, "4", A, cells.MintToken([]byte("another key of the test........."), "acme", "cell-a", 4)), code: cells.CodeBadRequest},
		{name: "token cut", setup: withKey, send: hdr(T, "acme", E, "4", A, mint("acme", "cell-a", 4)[:44]), code: cells.CodeBadRequest},
		{name: "old token is good for the floor", setup: withKey, send: hdr(T, "floor", E, "5", A, mint("floor", "cell-a", 5)), epoch: "7"},
		{name: "malformed tenant with a key", setup: withKey, send: hdr(T, "a/b"), code: cells.CodeInvalidTenant},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &setup{table: newFaultTable(t)}
			fill(t, s.table)
			if c.setup != nil {
				c.setup(s)
			}
			r := cells.NewRouter(s.table, cells.WithDefaultCell("cell-a"), cells.WithRouterLogger(quiet))
			t.Cleanup(func() { _ = r.Close() })
			if !s.noLoad {
				if err := r.Start(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if c.late != nil {
				s.table.with(func(*faultTable) { c.late(s) })
			}
			svc := newService(t, cells.NewGates("cell-a", r, append(s.opts, cells.WithGateLogger(quiet))...))

			for protocol, send := range map[string]func() reply{
				"HTTP": func() reply {
					got, resp := svc.overHTTP(t, http.MethodPost, c.send)
					if resp == nil {
						return got
					}
					if resp.StatusCode != http.StatusOK && resp.StatusCode != c.code.HTTPStatus() {
						t.Errorf("HTTP: status %d", resp.StatusCode)
					}
					if want := c.code == cells.CodeMoving || c.code == cells.CodeBackendUnavailable; (resp.Header.Get("Retry-After") == "1") != want {
						t.Errorf("HTTP: Retry-After %q", resp.Header.Get("Retry-After"))
					}
					return got
				},
				"unary":  func() reply { return svc.overUnary(t, c.send) },
				"stream": func() reply { return svc.overStream(t, c.send) },
			} {
				before := svc.ran.Load()
				got := send()
				ran := svc.ran.Load() - before
				switch {
				case got.err != nil:
					t.Errorf("%s: %v", protocol, got.err)
				case got.cell != "cell-a":
					t.Errorf("%s: answered by %q", protocol, got.cell)
				case c.code == "":
					if got.answer != nil || ran != 1 || got.epoch != c.epoch || got.mark != "" {
						t.Errorf("%s: want it admitted at epoch %s; got %v, epoch %q, mark %q, %d handlers ran", protocol, c.epoch, got.answer, got.epoch, got.mark, ran)
					}
				case got.answer == nil || got.answer.Code != c.code || ran != 0 || got.mark != string(c.code):
					t.Errorf("%s: want %s; got %v, mark %q, %d handlers ran", protocol, c.code, got.answer, got.mark, ran)
				default:
					if !s.noLoad && c.code != cells.CodeBadRequest && got.answer.Revision == 0 {
						t.Errorf("%s: the answer does not say what it was decided by: %+v", protocol, got.answer)
					}
					if retries := got.answer.RetryAfter > 0; retries != (c.code == cells.CodeMoving || c.code == cells.CodeBackendUnavailable) {
						t.Errorf("%s: retry after %v", protocol, got.answer.RetryAfter)
					}
				}
			}
			if n := svc.gates.Total(); n != 0 {
				eventually(t, "nothing is in flight", func() bool { return svc.gates.Total() == 0 })
			}
		})
	}
}

// fill writes one tenant of each kind, for gates of cell-a.
func fill(t *testing.T, table cells.RoutingTable) {
	t.Helper()
	floor := active("floor", "cell-a", 7)
	floor.Floor = 4
	preparing := inMove("preparing", cells.StateActive, "cell-a", 4, 4)
	gone, leaving := active("gone", "cell-a", 2), active("leaving", "cell-a", 2)
	gone.State, leaving.State = cells.StateDeleted, cells.StateDeleting
	for _, row := range []cells.TenantRoute{
		active("acme", "cell-a", 4), active("bolt", "cell-b", 2), floor, preparing, gone, leaving,
		inMove("quiescing", cells.StateQuiescing, "cell-a", 4, 4),
		inMove("draining", cells.StateDraining, "cell-a", 4, 4),
		inMove("copying", cells.StateCopying, "cell-a", 4, 5),
		inMove("committing", cells.StateCommitting, "cell-a", 4, 6),
		inMove("committed", cells.StateCommitting, "cell-b", 4, 6),
	} {
		set(t, table, row)
	}
}

// A request that was routed by a newer route than this process has seen is not
// refused: the row is read.
func TestNewerEpochReadsTheRow(t *testing.T) {
	noLeaks(t)
	table := newFaultTable(t)
	table.mute = true // the watch is behind
	set(t, table, active("acme", "cell-b", 4))
	r := startRouter(t, table)
	svc := newService(t, cells.NewGates("cell-a", r))
	send := hdr(cells.HeaderTenant, "acme", cells.HeaderEpoch, "6")
	for i, do := range []func() reply{
		func() reply { got, _ := svc.overHTTP(t, http.MethodGet, send); return got },
		func() reply { return svc.overUnary(t, send) },
		func() reply { return svc.overStream(t, send) },
	} {
		epoch := cells.Epoch(6 + 2*i)
		set(t, table, active("acme", "cell-a", epoch))
		send.Set(cells.HeaderEpoch, fmt.Sprint(epoch))
		if got := do(); got.answer != nil || got.err != nil || got.epoch != fmt.Sprint(epoch) {
			t.Errorf("protocol %d: %+v", i, got)
		}
	}
}

// Without cells the middleware is not there.
func TestWithoutCells(t *testing.T) {
	noLeaks(t)
	svc := newService(t, nil)
	for name, got := range map[string]reply{
		"unary": svc.overUnary(t, hdr("x", "y")), "stream": svc.overStream(t, hdr(cells.HeaderTenant, "a/b")),
	} {
		if got.err != nil || got.answer != nil || got.cell != "" {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if got, resp := svc.overHTTP(t, http.MethodGet, hdr()); got.err != nil || resp.StatusCode != http.StatusOK || got.cell != "" {
		t.Errorf("HTTP: %+v", got)
	}
	if svc.ran.Load() != 3 {
		t.Errorf("%d handlers ran", svc.ran.Load())
	}
}

func TestUnguarded(t *testing.T) {
	noLeaks(t)
	r := startRouter(t, cells.NewMemTable())
	svc := newService(t, cells.NewGates("cell-a", r), cells.WithUnguarded(func(path string) bool {
		return path == "/v1/do" || path == unaryMethod || path == streamMethod
	}))
	got, _ := svc.overHTTP(t, http.MethodGet, hdr())
	for name, got := range map[string]reply{"HTTP": got, "unary": svc.overUnary(t, hdr()), "stream": svc.overStream(t, hdr())} {
		if got.err != nil || got.answer != nil || got.mark != "" {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if svc.gates.Total() != 0 || svc.ran.Load() != 3 {
		t.Errorf("%d in flight, %d ran", svc.gates.Total(), svc.ran.Load())
	}
}

func TestTokens(t *testing.T) {
	key, other := cells.DeriveCellKey(admissionKey, "cell-a"), cells.DeriveCellKey(admissionKey, "cell-b")
	if len(key) != 32 || string(key) == string(other) {
		t.Fatal("the keys of two cells should be 32 bytes and differ")
	}
	if cells.DeriveCellKey([]byte("short"), "cell-a") != nil {
		t.Error("a key was derived from 5 bytes")
	}
	token := cells.MintToken(key, "acme", "cell-a", 4)
	if token != cells.MintToken(key, "acme", "cell-a", 4) {
		t.Error("tokens for the same differ")
	}
	if !cells.VerifyToken(key, token, "acme", "cell-a", 4) {
		t.Error("the token is not good")
	}
	// No two fields can be shifted into each other.
	if cells.MintToken(key, "ab", "c", 4) == cells.MintToken(key, "a", "bc", 4) {
		t.Error("two tenants share a token")
	}
	if cells.VerifyToken(nil, cells.MintToken(nil, "acme", "cell-a", 4), "acme", "cell-a", 4) {
		t.Error("an empty key verifies")
	}
	for i := range len(token) {
		bad := []byte(token)
		bad[i] ^= 1
		if cells.VerifyToken(key, string(bad), "acme", "cell-a", 4) {
			t.Errorf("good with byte %d changed", i)
		}
	}
}

// Keys are changed under traffic; a token that was good with a key that is gone is
// not good any more, although it was remembered.
func TestKeyRotation(t *testing.T) {
	noLeaks(t)
	table := cells.NewMemTable()
	set(t, table, active("acme", "cell-a", 1))
	r := startRouter(t, table)
	oldKey, newKey := []byte("the old admission key..........."), []byte("the new admission key...........")
	g := cells.NewGates("cell-a", r, cells.WithAdmissionKey(oldKey))
	try := func(key []byte) error {
		a, err := g.Admit(t.Context(), cells.AdmitRequest{Tenant: "acme", HasEpoch: true, Epoch: 1, Token: cells.MintToken(key, "acme", "cell-a", 1)})
		if err == nil {
			a.Done()
		}
		return err
	}
	for range 3 {
		if err := try(oldKey); err != nil {
			t.Fatal(err)
		}
		if err := try(newKey); cells.AnswerOf(err) == nil {
			t.Fatal("a key that is not there was good")
		}
	}
	if err := g.SetAdmissionKeys(newKey, oldKey); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := try(newKey); err != nil {
			t.Fatal(err)
		}
		if err := try(oldKey); err != nil {
			t.Fatal(err)
		}
	}
	// What is remembered is good for its own epoch only.
	for _, epoch := range []cells.Epoch{0, 2} {
		if _, err := g.Admit(t.Context(), cells.AdmitRequest{Tenant: "acme", HasEpoch: true, Epoch: epoch, Token: cells.MintToken(oldKey, "acme", "cell-a", 1)}); codeOf(err) != cells.CodeBadRequest {
			t.Errorf("the token of epoch 1 at epoch %d: %v", epoch, err)
		}
	}
	if err := g.SetAdmissionKeys(newKey); err != nil {
		t.Fatal(err)
	}
	if err := try(oldKey); cells.AnswerOf(err) == nil || cells.AnswerOf(err).Code != cells.CodeBadRequest {
		t.Errorf("the old key is still good: %v", err)
	}
	if err := g.SetAdmissionKeys([]byte("short")); err == nil {
		t.Error("a short key was taken")
	}
	// A job of the process itself needs none.
	job, err := g.Admit(t.Context(), cells.AdmitRequest{Tenant: "acme", Internal: true})
	if err != nil {
		t.Fatal(err)
	}
	job.Done()
}
