// SPDX-License-Identifier: Apache-2.0

package tenancy_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
	mt "github.com/cloister-dev/cloister/member/tenancy"
)

// wait lets t pass; only in a bubble, where it takes no time.
func wait(d time.Duration) { <-time.After(d); synctest.Wait() }

// With a cell, rows that cannot be read are kept for MaxStale and no longer, and the
// process serves again once a read lands. Without one they are kept for ever.
func TestStaleness(t *testing.T) {
	for _, c := range []struct {
		name string
		cell cells.CellID
		rows tenancy.Rows
		// gated before the outage, after it has lasted, and after it.
		before, during, after bool
	}{
		{"cell", "a", rows(true, tenancy.Enforced), false, true, false},
		{"cell, recording", "a", rows(true, tenancy.Recording), false, true, false},
		{"alone, open", "", tenancy.Rows{}, false, false, false},
		{"alone, recording", "", rows(true, tenancy.Recording), false, false, false},
		{"alone, enforced", "", rows(true, tenancy.Enforced), true, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStore(c.rows, "t")
				cfg := config(s, &fakeRouter{})
				cfg.Cell = c.cell
				p := start(t, cfg)
				gated := func() bool {
					a := p.Gate(t.Context())
					ready, _ := p.Ready()
					if (a == nil) != ready {
						t.Errorf("gate %v, ready %t", a, ready)
					}
					return a != nil
				}
				if gated() != c.before {
					t.Fatalf("before: %+v", p.Reason())
				}
				if c.cell != "" {
					if err := p.EnsureHeld(t.Context(), "t", mine("t")); err != nil {
						t.Fatal(err)
					}
				}
				s.do(func(s *fakeStore) { s.down = true })
				begun := time.Now()
				for time.Since(begun) < 50*time.Second {
					if gated() != c.before {
						t.Fatalf("after %s: %+v", time.Since(begun), p.Reason())
					}
					if c.cell != "" {
						if err := p.EnsureHeld(t.Context(), "t", mine("t")); err != nil {
							t.Fatalf("a held tenant after %s: %v", time.Since(begun), err)
						}
						if got := codeOf(p.EnsureHeld(t.Context(), "new", mine("new"))); got != cells.CodeBackendUnavailable {
							t.Fatalf("a new tenant after %s: %s", time.Since(begun), got)
						}
					}
					wait(time.Second)
				}
				wait(20 * time.Second)
				if gated() != c.during {
					t.Errorf("after MaxStale: %+v", p.Reason())
				}
				if c.during && c.cell != "" && p.Reason().Code != tenancy.ReasonUnread {
					t.Errorf("reason %+v", p.Reason())
				}
				wait(time.Hour)
				if gated() != c.during {
					t.Errorf("after an hour: %+v", p.Reason())
				}
				s.do(func(s *fakeStore) { s.down = false })
				wait(3 * time.Second)
				if gated() != c.after {
					t.Errorf("after a read landed: %+v", p.Reason())
				}
				_ = p.Close(t.Context())
			})
		})
	}
}

// A failed first read fails the boot, or leaves the process gated where it may boot
// so, whatever the deployment is.
func TestFirstRead(t *testing.T) {
	for _, cell := range []cells.CellID{"a", ""} {
		synctest.Test(t, func(t *testing.T) {
			s := newStore(rows(true, tenancy.Recording))
			s.down = true
			cfg := config(s, &fakeRouter{})
			cfg.Cell = cell
			p, err := mt.New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Start(t.Context()); !errors.Is(err, cells.ErrUnavailable) {
				t.Errorf("cell %q: %v", cell, err)
			}
			if len(s.beats) != 0 {
				t.Error("it reported before a read landed")
			}
			_ = p.Close(t.Context())
			cfg.AllowUnread = true
			p = start(t, cfg)
			if a := p.Gate(t.Context()); a == nil || a.Code != cells.CodeAuthUnavailable || a.RetryAfter <= 0 {
				t.Errorf("cell %q: unread and not gated: %v", cell, a)
			}
			wait(2 * time.Second)
			s.do(func(s *fakeStore) { s.down = false })
			wait(3 * time.Second)
			if a := p.Gate(t.Context()); a != nil {
				t.Errorf("cell %q: %v", cell, a)
			}
			if s.beats["i-1"].Mode != tenancy.Recording {
				t.Errorf("heartbeat %+v", s.beats["i-1"])
			}
			_ = p.Close(t.Context())
			if len(s.beats) != 0 {
				t.Error("the heartbeat stays")
			}
		})
	}
}

// A change of the mode is seen within CacheFor, also by a process whose loop is
// behind: rows older than that are read again before a request is decided.
func TestModeIsSeenInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, r := newStore(rows(true, tenancy.Recording)), &fakeRouter{attaching: true, winner: mt.Winner{Cell: "b"}}
		p := start(t, config(s, r))
		wait(time.Minute)
		s.do(func(s *fakeStore) { s.rows.Mode = tenancy.Enforced })
		wait(5*time.Second + time.Millisecond)
		if p.Mode() != tenancy.Enforced || s.beats["i-1"].Mode != tenancy.Enforced {
			t.Errorf("mode %q, heartbeat %q", p.Mode(), s.beats["i-1"].Mode)
		}
		s.do(func(s *fakeStore) { s.rows.Mode = tenancy.Recording })
		wait(5*time.Second + time.Millisecond)
		if p.Mode() != tenancy.Recording {
			t.Errorf("mode %q", p.Mode())
		}
		_ = p.Close(t.Context())
	})
}

// Requests wait for one read that hangs, and for none after it has failed.
func TestReadsThatHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(rows(true, tenancy.Enforced), "t")
		cfg := config(s, &fakeRouter{})
		cfg.CacheFor, cfg.BeatEvery = 100*time.Second, 100*time.Second // the loop stays out of it
		cfg.MaxStale = 1000 * time.Second
		p := start(t, cfg)
		s.do(func(s *fakeStore) { s.hang = true })
		wait(49 * time.Second)
		s.do(func(s *fakeStore) { s.reads = 0 })
		wait(60 * time.Second) // the loop's own read, at 50 s, has failed
		begun := time.Now()
		for range 10 {
			if a := p.Gate(t.Context()); a != nil {
				t.Error(a)
			}
		}
		if time.Since(begun) != 0 {
			t.Errorf("requests waited %s", time.Since(begun))
		}
		_ = p.Close(t.Context())
	})
}

// handler counts what reaches the service.
func handler(n *atomic.Int64) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { n.Add(1) })
}

// TestGatedProcess: in every state that gates, health is answered, the probe's route
// is passed on, and everything else gets 503 with Retry-After and never reaches the
// service; workers do not run and the heartbeat says so.
func TestGatedProcess(t *testing.T) {
	other := rows(true, tenancy.Enforced)
	other.First.Cell = "b"
	drift := rows(true, tenancy.Enforced)
	f := fingerprint("elsewhere.example")
	drift.Self = &tenancy.Self{Current: &f}
	lost := rows(true, tenancy.Enforced)
	lost.Mode = ""
	for _, c := range []struct {
		name   string
		cell   cells.CellID
		rows   tenancy.Rows
		reason string
		words  string
	}{
		{"open", "a", tenancy.Rows{}, tenancy.ReasonUnprepared, "cell prepare"},
		{"partial", "a", lost, tenancy.ReasonPartial, "mode"},
		{"another cell's stores", "a", other, tenancy.ReasonOtherCell, "cell b"},
		{"another configuration", "a", drift, tenancy.ReasonFingerprint, "hosts"},
		{"CELL lost, enforced", "", rows(true, tenancy.Enforced), tenancy.ReasonNoCell, "CELL"},
		{"CELL lost, a later cell that says recording", "", rows(false, tenancy.Recording), tenancy.ReasonNoCell, "CELL"},
		{"CELL lost, partial", "", lost, tenancy.ReasonPartial, "CELL"},
		{"CELL lost, only a tenancy row", "", tenancy.Rows{AnyTenancy: true}, tenancy.ReasonPartial, "CELL"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStore(c.rows, "t")
				cfg := config(s, &fakeRouter{winner: won, attaching: true})
				cfg.Cell = c.cell
				p := start(t, cfg)
				var served, resolved, worked atomic.Int64
				h := p.Handler(handler(&served), mt.HTTP{
					Classify: func(r *http.Request) mt.Class {
						switch r.URL.Path {
						case "/free":
							return mt.Free
						case "/probe":
							return mt.Exempt
						}
						return mt.Checked
					},
					Resolve: func(*http.Request) (cells.TenantID, mt.Principal, error) {
						resolved.Add(1)
						return "t", mine("t"), nil
					},
				})
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() {
					done <- p.RunWorkers(ctx, func(ctx context.Context) error { worked.Add(1); <-ctx.Done(); return nil })
				}()
				synctest.Wait()
				for path, want := range map[string]int{"/livez": 200, "/readyz": 503, "/v1/x": 503, "/free": 503, "/scim/v2/Users": 503, "/oauth/token": 503, "/probe": 200} {
					rec := httptest.NewRecorder()
					h.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), "GET", path, nil))
					if rec.Code != want {
						t.Errorf("%s: %d", path, rec.Code)
					}
					if want == 503 && path != "/readyz" && (rec.Header().Get("Retry-After") == "" || rec.Header().Get(cells.HeaderAnswer) != string(cells.CodeAuthUnavailable)) {
						t.Errorf("%s: %v", path, rec.Header())
					}
					if path == "/readyz" && !strings.Contains(rec.Body.String(), c.words) {
						t.Errorf("/readyz says %q", rec.Body.String())
					}
				}
				if p.Reason().Code != c.reason || served.Load() != 1 || resolved.Load() != 0 || worked.Load() != 0 {
					t.Errorf("reason %+v, served %d, resolved %d, worked %d", p.Reason(), served.Load(), resolved.Load(), worked.Load())
				}
				if hb := s.beats["i-1"]; hb.Gated != c.reason || hb.Workers || hb.Lease != "" {
					t.Errorf("heartbeat %+v", hb)
				}
				for _, err := range []error{p.EnsureHeld(ctx, "t", mine("t")), p.EnsureHeldForWork(ctx, "t"), p.EnsureHeldBySystem(ctx, "t")} {
					if codeOf(err) != cells.CodeAuthUnavailable {
						t.Error(err)
					}
				}
				cancel()
				if err := <-done; err != nil {
					t.Error(err)
				}
				_ = p.Close(t.Context())
			})
		})
	}
}

// Workers stand aside when the process is gated, and come back.
func TestWorkersStandAside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(rows(true, tenancy.Enforced))
		p := start(t, config(s, &fakeRouter{}))
		var running atomic.Int64
		causes := make(chan error, 10)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- p.RunWorkers(ctx, func(ctx context.Context) error {
				p.SetLease("lease")
				running.Add(1)
				<-ctx.Done()
				running.Add(-1)
				causes <- context.Cause(ctx)
				return nil
			})
		}()
		wait(3 * time.Second)
		if hb := s.beats["i-1"]; running.Load() != 1 || !hb.Workers || hb.Lease != "lease" {
			t.Errorf("running %d, heartbeat %+v", running.Load(), hb)
		}
		s.do(func(s *fakeStore) { s.rows.Mode = "" })
		wait(7 * time.Second)
		if hb := s.beats["i-1"]; running.Load() != 0 || hb.Workers || hb.Lease != "" || !errors.Is(<-causes, mt.ErrStandAside) {
			t.Errorf("gated: running %d, heartbeat %+v", running.Load(), hb)
		}
		s.do(func(s *fakeStore) { s.rows.Mode = tenancy.Enforced })
		wait(7 * time.Second)
		if running.Load() != 1 {
			t.Error("the workers do not come back")
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		failed := errors.New("failed")
		if err := p.RunWorkers(t.Context(), func(context.Context) error { return failed }); !errors.Is(err, failed) {
			t.Error(err)
		}
		_ = p.Close(t.Context())
	})
}

// HTTP and gRPC refuse the same with the same codes, and handlers know what was
// checked.
func TestMiddlewares(t *testing.T) {
	s := newStore(rows(true, tenancy.Enforced), "held")
	p := start(t, config(s, &fakeRouter{winner: mt.Winner{Cell: "b"}}))
	plain := errors.New("bad token")
	for _, c := range []struct {
		tenant cells.TenantID
		who    mt.Principal
		err    error
		code   cells.Code
	}{
		{"held", mine("held"), nil, ""},
		{"held", mine("x"), nil, cells.CodeForbidden},
		{"x", mine("x"), nil, cells.CodeWrongCell},
		{"", mine(""), nil, cells.CodeInvalidTenant},
		{"held", mine("held"), plain, cells.CodeUnauthenticated},
		{"held", mine("held"), &cells.Answer{Code: cells.CodeAuthUnavailable}, cells.CodeAuthUnavailable},
	} {
		var got mt.Checkpoint
		h := p.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got, _ = mt.FromContext(r.Context()) }),
			mt.HTTP{Resolve: func(*http.Request) (cells.TenantID, mt.Principal, error) { return c.tenant, c.who, c.err }})
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), "GET", "/", nil))
		want := 200
		if c.code != "" {
			want = c.code.HTTPStatus()
		}
		if rec.Code != want || rec.Header().Get(cells.HeaderAnswer) != string(c.code) || c.code == "" && got.Tenant != c.tenant {
			t.Errorf("HTTP %+v: %d %s, checked %+v", c, rec.Code, rec.Header().Get(cells.HeaderAnswer), got)
		}
		g := mt.GRPC{Resolve: func(context.Context, string, any) (cells.TenantID, mt.Principal, error) {
			return c.tenant, c.who, c.err
		}}
		for name, call := range map[string]func() error{
			"unary": func() error {
				_, err := p.UnaryServerInterceptor(g)(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: "/a/b"}, func(ctx context.Context, _ any) (any, error) {
					got, _ = mt.FromContext(ctx)
					return nil, nil
				})
				return err
			},
			"stream": func() error {
				return p.StreamServerInterceptor(g)(nil, fakeStream{ctx: t.Context()}, &grpc.StreamServerInfo{FullMethod: "/a/b"}, func(_ any, ss grpc.ServerStream) error {
					got, _ = mt.FromContext(ss.Context())
					return nil
				})
			},
		} {
			got = mt.Checkpoint{}
			err := call()
			grpcWant := codes.OK
			if c.code != "" {
				grpcWant = c.code.GRPCCode()
			}
			if status.Code(err) != grpcWant || c.code == "" && got.Tenant != c.tenant || c.code != "" && got.Tenant != "" {
				t.Errorf("%s %+v: %v, checked %+v", name, c, err, got)
			}
		}
	}
	// Nothing verifies: nothing is served.
	rec := httptest.NewRecorder()
	p.Handler(http.NotFoundHandler(), mt.HTTP{}).ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), "GET", "/", nil))
	if rec.Code != 401 {
		t.Errorf("without Resolve: %d", rec.Code)
	}
}

type fakeStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (f fakeStream) Context() context.Context { return f.ctx }

func TestConfigIsChecked(t *testing.T) {
	good := config(newStore(tenancy.Rows{}), &fakeRouter{})
	for name, change := range map[string]func(*mt.Config){
		"store": func(c *mt.Config) { c.Store = nil }, "cell": func(c *mt.Config) { c.Cell = "A_b" }, "router": func(c *mt.Config) { c.Router = nil },
		"fingerprint": func(c *mt.Config) { c.Fingerprint = tenancy.Fingerprint{} }, "negative": func(c *mt.Config) { c.CacheFor = -1 },
		"stale": func(c *mt.Config) { c.MaxStale = time.Second }, "instance": func(c *mt.Config) { c.Instance = "a b" },
	} {
		c := good
		change(&c)
		if _, err := mt.New(c); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
