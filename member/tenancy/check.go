// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// Principal is who a verified credential stands for, as far as tenants go.
type Principal struct {
	// Tenant is the one that the credential is scoped to; "" for none.
	Tenant cells.TenantID
	// Wide may act in every tenant that the cell holds (a platform's operator, a token
	// for all tenants). It never brings one to the cell.
	Wide bool
	// Subject is for logs.
	Subject string
}

// MayActIn reports whether the principal may act in a tenant at all.
func (p Principal) MayActIn(t cells.TenantID) bool { return p.Wide || p.Tenant != "" && p.Tenant == t }

// scoped says whether the tenant is the principal's own.
func (p Principal) scoped(t cells.TenantID) bool { return !p.Wide && p.Tenant == t }

// heldAt is when a tenant's row was looked for, and whether it was there.
type heldAt struct {
	held bool
	at   time.Time
}

// maxHeld bounds the memory of tenants; beyond it the oldest answers go first.
const maxHeld = 100_000

type attachingAt struct {
	yes bool
	at  time.Time
}

// EnsureHeld is the check of a request: it returns nil when the cell serves the
// tenant for this principal, and otherwise a [*cells.Answer]. Call it after the
// credential was verified, before anything is read or written for the tenant. It may
// write the tenant's row; when it returns an error it has written nothing.
func (p *Process) EnsureHeld(ctx context.Context, tenant cells.TenantID, who Principal) error {
	if err := validTenant(tenant); err != nil {
		return err
	}
	if !who.MayActIn(tenant) {
		return &cells.Answer{Code: cells.CodeForbidden, Detail: "the credential is not for this tenant"}
	}
	return p.ensure(ctx, tenant, who.scoped(tenant))
}

// EnsureHeldBySystem is the check of a path that has no principal yet: sign-up, and
// sign-in of people who are new. It records the tenant or refuses; it never places.
func (p *Process) EnsureHeldBySystem(ctx context.Context, tenant cells.TenantID) error {
	if err := validTenant(tenant); err != nil {
		return err
	}
	return p.ensure(ctx, tenant, false)
}

// EnsureHeldForWork is the check of a worker before it writes for a tenant. While
// the cell records, workers run as before and record nothing.
func (p *Process) EnsureHeldForWork(ctx context.Context, tenant cells.TenantID) error {
	if err := validTenant(tenant); err != nil {
		return err
	}
	rows, reason := p.view(ctx)
	if a := gated(reason); a != nil {
		return a
	}
	if p.cfg.Cell == "" || rows.State() == tenancy.StateRecording {
		return nil
	}
	held, err := p.isHeld(ctx, tenant, true)
	if err != nil {
		return err
	}
	if !held {
		return notHeld(p.cfg.Cell, tenant)
	}
	return nil
}

func validTenant(t cells.TenantID) error {
	if err := t.Validate(); err != nil {
		return &cells.Answer{Code: cells.CodeInvalidTenant, Detail: err.Error()}
	}
	if tenancy.Everybody(string(t)) {
		return &cells.Answer{Code: cells.CodeInvalidTenant, Detail: fmt.Sprintf("%q names no tenant", t)}
	}
	return nil
}

func notHeld(cell cells.CellID, t cells.TenantID) *cells.Answer {
	return &cells.Answer{Code: cells.CodeWrongCell, Tenant: t, Detail: fmt.Sprintf("cell %s does not hold the tenant", cell)}
}

func (p *Process) ensure(ctx context.Context, tenant cells.TenantID, scoped bool) error {
	rows, reason := p.view(ctx)
	if a := gated(reason); a != nil {
		return a
	}
	if p.cfg.Cell == "" {
		return nil // a single deployment, or one whose processes do not check yet
	}
	held, err := p.isHeld(ctx, tenant, !scoped && rows.State() == tenancy.StateEnforced)
	if err != nil || held {
		return err
	}
	if rows.State() == tenancy.StateRecording {
		held, err := p.record(ctx, tenant)
		if err != nil || held {
			return err
		}
		// The mode was enforced meanwhile; the cache will say so, too.
	}
	if !scoped {
		return notHeld(p.cfg.Cell, tenant)
	}
	return p.place(ctx, tenant)
}

// isHeld looks for the tenant's row. An answer that it is there is used for CacheFor,
// and kept for MaxStale while the store does not answer; that it is not there is used
// only where useMissing says so.
func (p *Process) isHeld(ctx context.Context, tenant cells.TenantID, useMissing bool) (bool, error) {
	begun := time.Now()
	p.mu.Lock()
	known, ok := p.held[tenant]
	p.mu.Unlock()
	if ok && begun.Sub(known.at) <= p.cfg.CacheFor && (known.held || useMissing) {
		return known.held, nil
	}
	rctx, cancel := context.WithTimeout(ctx, p.cfg.ReadTimeout)
	held, err := p.cfg.Store.Held(rctx, tenant)
	cancel()
	if err != nil {
		if ok && known.held && begun.Sub(known.at) <= p.cfg.MaxStale {
			return true, nil
		}
		return false, unavailable("the cell's database did not answer", err)
	}
	p.remember(tenant, held, begun)
	return held, nil
}

func (p *Process) remember(tenant cells.TenantID, held bool, at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.held) >= maxHeld {
		if _, ok := p.held[tenant]; !ok {
			p.forget()
		}
	}
	p.held[tenant] = heldAt{held, at}
}

// forget drops what is too old to be used, or any tenth when nothing is. The caller
// holds mu.
func (p *Process) forget() {
	for t, h := range p.held {
		if time.Since(h.at) > p.cfg.MaxStale || !h.held {
			delete(p.held, t)
		}
	}
	for t := range p.held {
		if len(p.held) <= maxHeld*9/10 {
			return
		}
		delete(p.held, t)
	}
}

func unavailable(detail string, err error) *cells.Answer {
	return &cells.Answer{Code: cells.CodeBackendUnavailable, Detail: detail, RetryAfter: time.Second, Err: err}
}

// record writes the row of a tenant that is new to a cell that records. held is
// false when the cell is enforced by now; nothing was written then.
func (p *Process) record(ctx context.Context, tenant cells.TenantID) (held bool, err error) {
	attaching, err := p.isAttaching(ctx)
	if err != nil {
		return false, unavailable("the directory did not say that the cell records tenants", err)
	}
	if !attaching {
		return false, unavailable("the directory does not have the cell as being attached, and its own rows say that it records; see cell restore", nil)
	}
	begun := time.Now()
	mode, held, err := p.cfg.Store.Record(ctx, tenant)
	if err != nil {
		return false, unavailable("the tenant could not be recorded", err)
	}
	if held {
		p.remember(tenant, true, begun)
		return true, nil
	}
	if mode != tenancy.Enforced {
		return false, unavailable("the cell's own rows are not what they were", nil)
	}
	return false, nil
}

// isAttaching asks the directory at most once in CacheFor. Only an answer counts: a
// refusal or none is an error, and asked again by the next request.
func (p *Process) isAttaching(ctx context.Context) (bool, error) {
	p.mu.Lock()
	known := p.attaching
	p.mu.Unlock()
	if !known.at.IsZero() && time.Since(known.at) <= p.cfg.CacheFor {
		return known.yes, nil
	}
	v, err := p.once(ctx, "state", func(ctx context.Context) (any, error) {
		begun := time.Now()
		yes, err := p.cfg.Router.Attaching(ctx, p.cfg.Cell)
		if err == nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return false, err
		}
		p.mu.Lock()
		p.attaching = attachingAt{yes, begun}
		p.mu.Unlock()
		return yes, nil
	})
	if err != nil {
		return false, err
	}
	return v.(bool), nil
}

// place has the tenant placed and holds it if this cell won.
func (p *Process) place(ctx context.Context, tenant cells.TenantID) error {
	_, err := p.once(ctx, "place "+string(tenant), func(ctx context.Context) (any, error) {
		w, err := p.cfg.Router.Place(ctx, PlaceCall{Cell: p.cfg.Cell, Tenant: tenant, Fingerprint: p.cfg.Fingerprint})
		if err == nil && ctx.Err() != nil {
			err = context.Cause(ctx) // late is no answer
		}
		if err != nil {
			a := unavailable("the tenant could not be placed", err)
			if from := cells.AnswerOf(err); from != nil && from.RetryAfter > 0 {
				a.RetryAfter = min(from.RetryAfter, time.Minute)
			}
			return nil, a
		}
		switch own := p.cfg.Fingerprint.Value(tenancy.FieldDeploymentID); {
		case w.Cell == "" || w.Cell.Validate() != nil:
			return nil, unavailable("the directory's answer names no cell", nil)
		case w.Cell != p.cfg.Cell:
			a := notHeld(p.cfg.Cell, tenant)
			a.Cell, a.Detail = w.Cell, "the tenant is placed in cell "+string(w.Cell)
			return nil, a
		case own == "" || w.DeploymentID != own:
			return nil, &cells.Answer{Code: cells.CodeTenancyRefused, Tenant: tenant, Detail: "the directory has another deployment under this cell's name", RetryAfter: 5 * time.Second}
		}
		begun := time.Now()
		hctx, cancel := context.WithTimeout(p.life, p.cfg.ReadTimeout)
		defer cancel()
		if err := p.cfg.Store.HoldPlaced(hctx, tenant); err != nil {
			return nil, unavailable("the tenant's row could not be written", err)
		}
		p.remember(tenant, true, begun)
		return nil, nil
	})
	var a *cells.Answer
	if err != nil && !errors.As(err, &a) {
		return unavailable("the request ended before the tenant was placed", err)
	}
	return err
}

// once runs f for all who ask for the same at the same time, for at most
// RouterTimeout, whoever of them gives up.
func (p *Process) once(ctx context.Context, key string, f func(context.Context) (any, error)) (any, error) {
	ch := p.calls.DoChan(key, func() (any, error) {
		ctx, cancel := context.WithTimeout(p.life, p.cfg.RouterTimeout)
		defer cancel()
		return f(ctx)
	})
	select {
	case r := <-ch:
		return r.Val, r.Err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
