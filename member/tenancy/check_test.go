// SPDX-License-Identifier: Apache-2.0

package tenancy_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
	mt "github.com/cloister-dev/cloister/member/tenancy"
)

var won = mt.Winner{Cell: "a", DeploymentID: deployment}

// TestEnsureHeld: every state, principal and answer of the directory gives the answer
// and writes what the rule says.
func TestEnsureHeld(t *testing.T) {
	wide, other := mt.Principal{Wide: true}, mt.Principal{Tenant: "other"}
	both := mt.Principal{Wide: true, Tenant: "t"}
	busy := &cells.Answer{Code: cells.CodeRateLimited, RetryAfter: 7 * time.Second}
	recording, enforced, later := rows(true, tenancy.Recording), rows(true, tenancy.Enforced), rows(false, tenancy.Recording)
	lost := rows(true, tenancy.Enforced)
	lost.Mode = ""
	for _, c := range []struct {
		name   string
		rows   tenancy.Rows
		held   bool
		who    mt.Principal
		router *fakeRouter
		code   cells.Code
		writes int
		places int
	}{
		{name: "held", rows: enforced, held: true, who: mine("t")},
		{name: "held, platform", rows: enforced, held: true, who: wide},
		{name: "held, while recording", rows: recording, held: true, who: mine("t")},
		{name: "held, another's token", rows: enforced, held: true, who: other, code: cells.CodeForbidden},
		{name: "held, nobody", rows: enforced, held: true, code: cells.CodeForbidden},
		{name: "placed here", rows: enforced, who: mine("t"), router: &fakeRouter{winner: won}, writes: 1, places: 1},
		{name: "placed elsewhere", rows: enforced, who: mine("t"), router: &fakeRouter{winner: mt.Winner{Cell: "b", DeploymentID: "d-2"}}, code: cells.CodeWrongCell, places: 1},
		{name: "elsewhere with this deployment's id", rows: enforced, who: mine("t"), router: &fakeRouter{winner: mt.Winner{Cell: "b", DeploymentID: deployment}}, code: cells.CodeWrongCell, places: 1},
		{name: "another deployment of this name", rows: enforced, who: mine("t"), router: &fakeRouter{winner: mt.Winner{Cell: "a", DeploymentID: "d-2"}}, code: cells.CodeTenancyRefused, places: 1},
		{name: "this name without a deployment", rows: enforced, who: mine("t"), router: &fakeRouter{winner: mt.Winner{Cell: "a"}}, code: cells.CodeTenancyRefused, places: 1},
		{name: "an answer without a cell", rows: enforced, who: mine("t"), code: cells.CodeBackendUnavailable, places: 1},
		{name: "the directory fails", rows: enforced, who: mine("t"), router: &fakeRouter{winner: won, err: errors.New("no")}, code: cells.CodeBackendUnavailable, places: 1},
		{name: "past the rate", rows: enforced, who: mine("t"), router: &fakeRouter{winner: won, err: busy}, code: cells.CodeBackendUnavailable, places: 1},
		{name: "platform, unheld", rows: enforced, who: wide, router: &fakeRouter{winner: won}, code: cells.CodeWrongCell},
		{name: "platform with a home, unheld", rows: enforced, who: both, router: &fakeRouter{winner: won}, code: cells.CodeWrongCell},
		{name: "another's token, unheld", rows: enforced, who: other, router: &fakeRouter{winner: won}, code: cells.CodeForbidden},
		{name: "recorded", rows: recording, who: mine("t"), router: &fakeRouter{attaching: true}, writes: 1},
		{name: "recorded for the platform", rows: recording, who: wide, router: &fakeRouter{attaching: true}, writes: 1},
		{name: "another's token records nothing", rows: recording, who: other, router: &fakeRouter{attaching: true}, code: cells.CodeForbidden},
		{name: "recording, not attaching", rows: recording, who: mine("t"), code: cells.CodeBackendUnavailable},
		{name: "recording, the directory refuses", rows: recording, who: mine("t"), router: &fakeRouter{attaching: true, stateErr: errors.New("401")}, code: cells.CodeBackendUnavailable},
		{name: "a later cell's recording records nothing", rows: later, who: mine("t"), router: &fakeRouter{attaching: true, winner: mt.Winner{Cell: "b"}}, code: cells.CodeWrongCell, places: 1},
		{name: "partial", rows: lost, held: true, who: mine("t"), code: cells.CodeAuthUnavailable},
		{name: "never prepared", rows: tenancy.Rows{}, who: mine("t"), code: cells.CodeAuthUnavailable},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStore(c.rows)
			s.held["t"] = c.held
			r := c.router
			if r == nil {
				r = &fakeRouter{}
			}
			p := start(t, config(s, r))
			err := p.EnsureHeld(t.Context(), "t", c.who)
			n, held := s.written()
			if codeOf(err) != c.code || n != c.writes || r.places != c.places {
				t.Fatalf("%v; %d writes, %d calls", err, n, r.places)
			}
			if held["t"] != (c.held || c.writes > 0) {
				t.Errorf("held: %v", held)
			}
			if a := cells.AnswerOf(err); r.err == busy && a.RetryAfter != busy.RetryAfter {
				t.Errorf("retry after %s", a.RetryAfter)
			}
		})
	}
}

func TestWithoutPrincipal(t *testing.T) {
	for _, c := range []struct {
		name   string
		rows   tenancy.Rows
		code   cells.Code
		writes int
		work   cells.Code
	}{
		{"recording", rows(true, tenancy.Recording), "", 1, ""},
		{"enforced", rows(true, tenancy.Enforced), cells.CodeWrongCell, 0, cells.CodeWrongCell},
	} {
		s, r := newStore(c.rows, "held"), &fakeRouter{attaching: true, winner: won}
		p := start(t, config(s, r))
		if got := codeOf(p.EnsureHeldForWork(t.Context(), "t")); got != c.work {
			t.Errorf("%s: work: %s", c.name, got)
		}
		if n, _ := s.written(); n != 0 {
			t.Errorf("%s: work wrote", c.name)
		}
		if got := codeOf(p.EnsureHeldBySystem(t.Context(), "t")); got != c.code {
			t.Errorf("%s: %s", c.name, got)
		}
		if n, _ := s.written(); n != c.writes || r.places != 0 {
			t.Errorf("%s: %d writes, %d calls", c.name, n, r.places)
		}
		if err := p.EnsureHeldForWork(t.Context(), "held"); err != nil {
			t.Errorf("%s: work for a held tenant: %v", c.name, err)
		}
	}
	// Without CELL nothing is checked where nothing is enforced.
	s := newStore(rows(true, tenancy.Recording))
	cfg := config(s, nil)
	cfg.Cell, cfg.Router = "", nil
	p := start(t, cfg)
	for _, err := range []error{p.EnsureHeld(t.Context(), "t", mine("t")), p.EnsureHeldForWork(t.Context(), "t"), p.EnsureHeldBySystem(t.Context(), "t")} {
		if err != nil {
			t.Error(err)
		}
	}
	if n, _ := s.written(); n != 0 || s.looks != 0 {
		t.Error("it looked or wrote")
	}
	for _, bad := range []cells.TenantID{"", "*", "-", "a b"} {
		for _, err := range []error{p.EnsureHeld(t.Context(), bad, mt.Principal{Wide: true}), p.EnsureHeldForWork(t.Context(), bad), p.EnsureHeldBySystem(t.Context(), bad)} {
			if codeOf(err) != cells.CodeInvalidTenant {
				t.Errorf("%q: %v", bad, err)
			}
		}
	}
}

// An insert that finds the mode enforced, in a process whose cache still says
// recording, goes on to the placement; one that cannot be placed is refused.
func TestEnforcedMeanwhile(t *testing.T) {
	for _, c := range []struct {
		who    mt.Principal
		router *fakeRouter
		code   cells.Code
		places int
		holds  int
	}{
		{mine("t"), &fakeRouter{attaching: true, winner: won}, "", 1, 1},
		{mine("t"), &fakeRouter{attaching: true, err: &cells.Answer{Code: cells.CodeCellClosed}}, cells.CodeBackendUnavailable, 1, 0},
		{mt.Principal{Wide: true}, &fakeRouter{attaching: true, winner: won}, cells.CodeWrongCell, 0, 0},
	} {
		s, r := newStore(rows(true, tenancy.Recording)), c.router
		p := start(t, config(s, r))
		s.do(func(s *fakeStore) { s.enforce = true })
		if got := codeOf(p.EnsureHeld(t.Context(), "t", c.who)); got != c.code || r.places != c.places || s.holds != c.holds || s.records != 0 {
			t.Errorf("%+v: %s, %d places, %d holds, %d records", c.who, got, r.places, s.holds, s.records)
		}
	}
}

// Many requests for a new tenant ask the directory once.
func TestConcurrentRequestsPlaceOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, r := newStore(rows(true, tenancy.Enforced)), &fakeRouter{winner: won}
		gate := make(chan struct{})
		p := start(t, config(s, slowRouter{r, gate}))
		var wg sync.WaitGroup
		errs := make(chan error, 64)
		for range 64 {
			wg.Go(func() { errs <- p.EnsureHeld(t.Context(), "t", mine("t")) })
		}
		synctest.Wait() // all are waiting for the one call
		close(gate)
		wg.Wait()
		for range 64 {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
		if r.places != 1 || s.holds != 1 {
			t.Errorf("%d calls, %d writes", r.places, s.holds)
		}
		if r.calls[0].Cell != "a" || r.calls[0].Tenant != "t" || !r.calls[0].Fingerprint.Equal(fingerprint("a.example")) {
			t.Errorf("called with %+v", r.calls[0])
		}
		_ = p.Close(t.Context())
	})
}

type slowRouter struct {
	*fakeRouter
	gate chan struct{}
}

func (r slowRouter) Place(ctx context.Context, c mt.PlaceCall) (mt.Winner, error) {
	w, err := r.fakeRouter.Place(ctx, c)
	<-r.gate
	return w, err
}

// A directory that does not answer is waited for RouterTimeout; whoever has gone
// waits no longer; a late answer is none.
func TestDirectoryHangs(t *testing.T) {
	for _, mode := range []tenancy.Mode{tenancy.Recording, tenancy.Enforced} {
		t.Run(string(mode), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, r := newStore(rows(true, mode)), &fakeRouter{hang: true, winner: won, attaching: true}
				p := start(t, config(s, r))
				begun := time.Now()
				if got := codeOf(p.EnsureHeld(t.Context(), "t", mine("t"))); got != cells.CodeBackendUnavailable || time.Since(begun) != 5*time.Second {
					t.Errorf("%s after %s", got, time.Since(begun))
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				begun = time.Now()
				if got := codeOf(p.EnsureHeld(ctx, "t", mine("t"))); got != cells.CodeBackendUnavailable || time.Since(begun) != time.Second {
					t.Errorf("%s after %s", got, time.Since(begun))
				}
				if n, _ := s.written(); n != 0 {
					t.Error("something was written")
				}
				r.do(func(r *fakeRouter) { r.hang = false })
				wait(5 * time.Second) // the call that was left ends
				if err := p.EnsureHeld(t.Context(), "t", mine("t")); err != nil {
					t.Errorf("afterwards: %v", err)
				}
				_ = p.Close(t.Context())
			})
		})
	}
}

// What the directory and the store said is used for CacheFor; that a tenant is not
// held only for who cannot bring it.
func TestAnswersAreUsedForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, r := newStore(rows(true, tenancy.Recording)), &fakeRouter{attaching: true}
		p := start(t, config(s, r))
		for i := range 20 {
			if err := p.EnsureHeld(t.Context(), cells.TenantID(fmt.Sprint("t", i)), mt.Principal{Wide: true}); err != nil {
				t.Fatal(err)
			}
		}
		if r.states != 1 {
			t.Errorf("the directory was asked %d times", r.states)
		}
		r.do(func(r *fakeRouter) { r.attaching = false })
		wait(6 * time.Second)
		if got := codeOf(p.EnsureHeld(t.Context(), "late", mine("late"))); got != cells.CodeBackendUnavailable {
			t.Errorf("when it serves: %s", got)
		}
		s.do(func(s *fakeStore) { s.rows.Mode = tenancy.Enforced; s.looks = 0 })
		wait(6 * time.Second)
		for range 5 {
			if got := codeOf(p.EnsureHeld(t.Context(), "x", mt.Principal{Wide: true})); got != cells.CodeWrongCell {
				t.Errorf("platform: %s", got)
			}
		}
		if s.looks != 1 {
			t.Errorf("the platform's requests looked %d times", s.looks)
		}
		s.do(func(s *fakeStore) { s.held["x"] = true })
		if err := p.EnsureHeld(t.Context(), "x", mine("x")); err != nil {
			t.Errorf("its own request looks again: %v", err)
		}
		if err := p.EnsureHeld(t.Context(), "x", mt.Principal{Wide: true}); err != nil {
			t.Errorf("and then the platform's: %v", err)
		}
		_ = p.Close(t.Context())
	})
}
