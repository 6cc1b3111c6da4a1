// SPDX-License-Identifier: Apache-2.0

package tenancy_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
	mt "github.com/cloister-dev/cloister/member/tenancy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeStore keeps the rows in memory. down makes every call fail, hang makes reads
// wait until their context ends.
type fakeStore struct {
	tenancy.Store // nil: what is not here is not used

	mu      sync.Mutex
	rows    tenancy.Rows
	held    map[cells.TenantID]bool
	down    bool
	hang    bool
	reads   int
	looks   int
	records int
	holds   int
	beats   map[string]tenancy.Heartbeat
	// enforce makes the next Record find the mode enforced.
	enforce bool
}

func newStore(rows tenancy.Rows, held ...cells.TenantID) *fakeStore {
	s := &fakeStore{rows: rows, held: map[cells.TenantID]bool{}, beats: map[string]tenancy.Heartbeat{}}
	for _, t := range held {
		s.held[t] = true
	}
	return s
}

func (s *fakeStore) do(f func(*fakeStore)) { s.mu.Lock(); defer s.mu.Unlock(); f(s) }

func (s *fakeStore) fail() error {
	if s.down {
		return fmt.Errorf("%w: down", cells.ErrUnavailable)
	}
	return nil
}

func (s *fakeStore) Read(ctx context.Context) (tenancy.Rows, error) {
	s.mu.Lock()
	s.reads++
	hang := s.hang
	s.mu.Unlock()
	if hang {
		<-ctx.Done()
		return tenancy.Rows{}, context.Cause(ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rows, s.fail()
}

func (s *fakeStore) Held(_ context.Context, t cells.TenantID) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.looks++
	return s.held[t], s.fail()
}

func (s *fakeStore) Record(_ context.Context, t cells.TenantID) (tenancy.Mode, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.enforce {
		s.rows.Mode = tenancy.Enforced
	}
	if err := s.fail(); err != nil || s.rows.State() != tenancy.StateRecording {
		return s.rows.EffectiveMode(), false, err
	}
	s.records++
	s.held[t] = true
	return tenancy.Recording, true, nil
}

func (s *fakeStore) Hold(_ context.Context, ts ...cells.TenantID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.holds++
	for _, t := range ts {
		s.held[t] = true
	}
	return s.fail()
}

func (s *fakeStore) HoldPlaced(ctx context.Context, t cells.TenantID) error { return s.Hold(ctx, t) }

func (s *fakeStore) Beat(_ context.Context, h tenancy.Heartbeat) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.beats[h.Instance] = h
	return s.fail()
}

func (s *fakeStore) Leave(_ context.Context, instance string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.beats, instance)
	return s.fail()
}

// written is everything that was written for tenants.
func (s *fakeStore) written() (int, map[cells.TenantID]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.records + s.holds, maps.Clone(s.held)
}

// fakeRouter is the directory.
type fakeRouter struct {
	mu        sync.Mutex
	placed    map[cells.TenantID]mt.Winner
	winner    mt.Winner // of a tenant that is placed nowhere
	err       error
	hang      bool
	attaching bool
	stateErr  error
	places    int
	states    int
	calls     []mt.PlaceCall
}

func (r *fakeRouter) do(f func(*fakeRouter)) { r.mu.Lock(); defer r.mu.Unlock(); f(r) }

func (r *fakeRouter) Place(ctx context.Context, c mt.PlaceCall) (mt.Winner, error) {
	r.mu.Lock()
	r.places++
	r.calls = append(r.calls, c)
	w, err, hang := r.winner, r.err, r.hang
	if p, ok := r.placed[c.Tenant]; ok {
		w = p
	}
	r.mu.Unlock()
	if hang {
		<-ctx.Done()
		return mt.Winner{}, context.Cause(ctx)
	}
	return w, err
}

func (r *fakeRouter) Attaching(ctx context.Context, _ cells.CellID) (bool, error) {
	r.mu.Lock()
	r.states++
	yes, err, hang := r.attaching, r.stateErr, r.hang
	r.mu.Unlock()
	if hang {
		<-ctx.Done()
		return true, nil // late, and not an error: it still is none
	}
	return yes, err
}

const deployment = "d-1"

func fingerprint(host string) tenancy.Fingerprint {
	f, err := tenancy.Config{PublicBaseURL: "https://" + host, DeploymentID: deployment}.Fingerprint()
	if err != nil {
		panic(err)
	}
	return f
}

func rows(first bool, mode tenancy.Mode) tenancy.Rows {
	f := fingerprint("a.example")
	return tenancy.Rows{First: &tenancy.First{First: first, Cell: "a"}, Mode: mode, Self: &tenancy.Self{Current: &f}}
}

func config(s tenancy.Store, r mt.Router) mt.Config {
	return mt.Config{Cell: "a", Store: s, Router: r, Fingerprint: fingerprint("a.example"), Instance: "i-1", Build: "b",
		Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
}

// start starts a process that ends with the test.
func start(t testing.TB, cfg mt.Config) *mt.Process {
	t.Helper()
	p, err := mt.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close(context.Background()) })
	if err := p.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return p
}

func codeOf(err error) cells.Code {
	if err == nil {
		return ""
	}
	var a *cells.Answer
	if !errors.As(err, &a) {
		return cells.Code("other: " + err.Error())
	}
	return a.Code
}

func mine(t cells.TenantID) mt.Principal { return mt.Principal{Tenant: t} }
