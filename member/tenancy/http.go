// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"context"
	"io"
	"net/http"

	"github.com/cloister-dev/cloister/cells"
)

// Class says what the check does with a route or a method.
type Class int

const (
	// Checked: the gate, the credential, the tenant. The zero value.
	Checked Class = iota
	// Free: it names no tenant and acts in none; the gate only.
	Free
	// Exempt: health and the probe, which a gated process answers, too.
	Exempt
)

// String is the class's name.
func (c Class) String() string {
	switch c {
	case Free:
		return "tenant-free"
	case Exempt:
		return "exempt"
	}
	return "checked"
}

// HTTP says how a service's requests are checked.
type HTTP struct {
	// Classify sorts requests; nil takes every one as Checked. /livez and /readyz are
	// answered by the middleware itself.
	Classify func(*http.Request) Class
	// Resolve verifies the credential and says which tenant the request acts in: the
	// credential's own where the request names none. It writes nothing. An error that is
	// a [*cells.Answer] is the answer; any other is UNAUTHENTICATED. Required for Checked
	// requests.
	Resolve func(*http.Request) (cells.TenantID, Principal, error)
}

type contextKey struct{}

// Checkpoint is what the check found out about a request.
type Checkpoint struct {
	Tenant    cells.TenantID
	Principal Principal
}

// FromContext returns what was checked, in the handler of a Checked request.
func FromContext(ctx context.Context) (Checkpoint, bool) {
	c, ok := ctx.Value(contextKey{}).(Checkpoint)
	return c, ok
}

// ContextWith returns a context for work that was checked by other means: a job that
// called EnsureHeldForWork, a test.
func ContextWith(ctx context.Context, c Checkpoint) context.Context {
	return context.WithValue(ctx, contextKey{}, c)
}

// Handler wraps a service's handler: /livez and /readyz, the gate, then for Checked
// requests the credential and the tenant. next sees only what passed. What an edge says
// of the tenant (Cell-Tenant) has to be the same one, or the answer is FORBIDDEN.
func (p *Process) Handler(next http.Handler, h HTTP) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == PathLive || r.URL.Path == PathReady {
			p.HealthHandler().ServeHTTP(w, r)
			return
		}
		class := Checked
		if h.Classify != nil {
			class = h.Classify(r)
		}
		if class == Exempt {
			next.ServeHTTP(w, r)
			return
		}
		if a := p.Gate(r.Context()); a != nil {
			cells.WriteProblem(w, r, a)
			return
		}
		if class == Free {
			next.ServeHTTP(w, r)
			return
		}
		ctx, err := p.check(r.Context(), r.Header[cells.HeaderTenant], func() (cells.TenantID, Principal, error) {
			if h.Resolve == nil {
				return "", Principal{}, &cells.Answer{Code: cells.CodeUnauthenticated, Detail: "nothing verifies credentials here"}
			}
			return h.Resolve(r)
		})
		if err != nil {
			cells.WriteProblem(w, r, answer(err))
			return
		}
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

// check resolves and ensures; the gate was passed. routed is the tenant that an edge
// has sent the request for, if one has: the gate behind the check would admit that one,
// and the edge may have found it in a name that anybody can write.
func (p *Process) check(ctx context.Context, routed []string, resolve func() (cells.TenantID, Principal, error)) (context.Context, error) {
	tenant, who, err := resolve()
	if err != nil {
		if a := cells.AnswerOf(err); a != nil {
			return nil, a
		}
		return nil, &cells.Answer{Code: cells.CodeUnauthenticated, Detail: "the credential was not accepted", Err: err}
	}
	for _, t := range routed {
		if t != string(tenant) {
			return nil, &cells.Answer{Code: cells.CodeForbidden, Detail: "the credential is not for the tenant that the request was sent for"}
		}
	}
	if err := p.EnsureHeld(ctx, tenant, who); err != nil {
		return nil, err
	}
	return ContextWith(ctx, Checkpoint{tenant, who}), nil
}

func answer(err error) *cells.Answer {
	if a := cells.AnswerOf(err); a != nil {
		return a
	}
	return &cells.Answer{Code: cells.CodeBackendUnavailable, Err: err}
}

// Paths of [Process.HealthHandler].
const (
	PathLive  = "/livez"
	PathReady = "/readyz"
)

// HealthHandler answers /livez (200 while the process can answer) and /readyz (200,
// or 503 with the reason), gated or not.
func (p *Process) HealthHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Cache-Control", "no-store")
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			w.WriteHeader(http.StatusMethodNotAllowed)
			return
		}
		switch r.URL.Path {
		case PathLive:
			_, _ = io.WriteString(w, "ok\n")
		case PathReady:
			if ready, why := p.Ready(); !ready {
				w.WriteHeader(http.StatusServiceUnavailable)
				_, _ = io.WriteString(w, why+"\n")
				return
			}
			_, _ = io.WriteString(w, "ok\n")
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	})
}
