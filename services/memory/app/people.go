// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/member/signin"
	"github.com/cloister-dev/cloister/member/signin/bot"
	signinpg "github.com/cloister-dev/cloister/member/signin/postgres"
	"github.com/cloister-dev/cloister/member/signin/scim"
	checks "github.com/cloister-dev/cloister/member/tenancy"
)

// people are a cell's: who may act, and who provisions them.
type people struct {
	bearers bearers
	store   signin.Store
	check   *signin.Check
	scim    *scim.Handler // nil with SCIM off
	where   http.Handler  // says where people sign in; nil without a provider
	bots    *bot.Server
	process *checks.Process
}

// openPeople connects to what the cell's database knows of its people.
func openPeople(ctx context.Context, dsn string, s checks.Settings, b bearers, log *slog.Logger) (_ *people, err error) {
	p := &people{bearers: b}
	if p.store, err = signinpg.Open(ctx, dsn, signinpg.Options{Checked: true}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	p.check, err = signin.NewCheck(signin.CheckConfig{Store: p.store, Need: func(context.Context) (signin.Need, error) {
		switch {
		case !s.Configuration.SCIM:
			return signin.NeedNothing, nil
		case p.process.Mode() == tenancy.Enforced:
			return signin.NeedActive, nil
		}
		return signin.NeedNotGone, nil
	}})
	if err != nil {
		return nil, err
	}
	if p.bots, err = bot.New(bot.Config{Store: p.store, Base: s.Configuration.PublicBaseURL}); err != nil {
		return nil, err
	}
	if c := s.Configuration; c.OIDCIssuer != "" && c.OIDCClientID != "" {
		if p.where, err = signin.MetadataHandler(c.PublicBaseURL, c.OIDCIssuer, c.OIDCClientID); err != nil {
			return nil, err
		}
	}
	if !s.Configuration.SCIM {
		return p, nil
	}
	list, err := scim.ReadTokens(s.SCIMTokensFile)
	if err != nil {
		return nil, fmt.Errorf("CELL_SCIM_TOKENS_FILE: %w", err)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%w: CELL_SCIM_TOKENS_FILE: there is no token", cells.ErrInvalid)
	}
	tokens, err := scim.NewTokens(s.Cell, list)
	if err != nil {
		return nil, fmt.Errorf("CELL_SCIM_TOKENS_FILE: %w", err)
	}
	p.scim, err = scim.New(scim.Config{Store: p.store, Tokens: tokens, Tenants: s.Configuration.Tenants, BaseURL: s.Configuration.PublicBaseURL, Log: log, Verify: p.principal,
		First: func(ctx context.Context) *tenancy.First {
			rows, _ := p.process.Rows(ctx)
			return rows.First
		},
		Held: func(ctx context.Context, t cells.TenantID, who *checks.Principal) error {
			if who == nil {
				return p.process.EnsureHeldBySystem(ctx, t)
			}
			return p.process.EnsureHeld(ctx, t, *who)
		}})
	return p, err
}

// begin gives the check of tenants, before anything is served.
func (p *people) begin(process *checks.Process) {
	if p != nil {
		p.process = process
	}
}

func (p *people) close() {
	if p != nil {
		_ = p.store.Close()
	}
}

// principal verifies a token and looks whether whom it stands for may act.
func (p *people) principal(ctx context.Context, raw string) (checks.Principal, error) {
	if p == nil || p.bearers.Verifier == nil {
		return checks.Principal{}, &cells.Answer{Code: cells.CodeUnauthenticated, Err: errors.New("nothing verifies credentials here")}
	}
	t, err := p.bearers.Verify(ctx, raw)
	if err != nil {
		return checks.Principal{}, err
	}
	if err := p.check.Admit(ctx, t); err != nil {
		return checks.Principal{}, err
	}
	return checks.Principal{Tenant: t.Tenant, Subject: t.Subject}, nil
}

// useOf is what the audit says of a bot's request: quoted, as it is the client's text.
func useOf(r *http.Request) string {
	path := r.URL.Path
	return fmt.Sprintf("%.20s %q in tenant %.200q", r.Method, path[:min(len(path), 200)], r.Header.Get(signin.HeaderTenant))
}

// resolve says in which tenant a request acts.
func (p *people) resolve(r *http.Request) (cells.TenantID, checks.Principal, error) {
	return signin.Resolve(r, func(ctx context.Context, raw string) (checks.Principal, error) {
		if p != nil && bot.Is(raw) {
			return p.bots.Principal(ctx, raw, useOf(r))
		}
		return p.principal(ctx, raw)
	})
}

// beside serves what is no call of the API: it goes through the gate on the process,
// and checks its credentials itself.
func (p *people) beside(process *checks.Process, api http.Handler) http.Handler {
	if p == nil {
		return api
	}
	free := func(h http.Handler) http.Handler {
		return process.Handler(h, checks.HTTP{Classify: func(*http.Request) checks.Class { return checks.Free }})
	}
	provision, where, prove := free(p.scim), free(p.where), free(p.bots)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case p.scim != nil && strings.HasPrefix(r.URL.Path, scim.Prefix):
			provision.ServeHTTP(w, r)
		case p.where != nil && r.URL.Path == signin.PathMetadata:
			where.ServeHTTP(w, r)
		case r.URL.Path == bot.PathChallenge || r.URL.Path == bot.PathToken:
			prove.ServeHTTP(w, r)
		default:
			api.ServeHTTP(w, r)
		}
	})
}
