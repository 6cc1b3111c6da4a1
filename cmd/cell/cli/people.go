// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/attach"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/member/signin"
	signinpg "github.com/cloister-dev/cloister/member/signin/postgres"
	"github.com/cloister-dev/cloister/member/signin/scim"
)

// people is what attach asks about a cell's people, of the cell's database. It connects
// when it is first asked.
type people struct {
	cell   cells.CellID
	dsn    string
	tokens string // the path of the SCIM tokens

	mu     sync.Mutex // guards what follows
	store  signin.Store
	listed map[string]signin.Unprovisioned // by the id that attach knows it by
}

var _ attach.People = (*people)(nil)

func (p *people) open(ctx context.Context) (signin.Store, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.store == nil {
		s, err := signinpg.Open(ctx, p.dsn, signinpg.Options{Checked: true, Connections: 2})
		if err != nil {
			return nil, err
		}
		p.store = s
	}
	return p.store, nil
}

func (p *people) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.store != nil {
		_ = p.store.Close()
		p.store = nil
	}
}

// Tokens implements [attach.People].
func (p *people) Tokens(ctx context.Context, first, fresh bool) (problems []string, err error) {
	if p.tokens == "" {
		return []string{"CELL_SCIM_TOKENS_FILE is not set in the settings given to this command"}, nil
	}
	list, err := scim.ReadTokens(p.tokens)
	if err != nil {
		return nil, usagef("CELL_SCIM_TOKENS_FILE: %w", err)
	}
	if len(list) == 0 {
		problems = append(problems, "there is no SCIM token")
	}
	problems = append(problems, scim.Problems(p.cell, list, &tenancy.First{First: first, Cell: p.cell})...)
	if !fresh {
		return problems, nil
	}
	s, err := p.open(ctx)
	if err != nil {
		return nil, err
	}
	users, err := s.Users(ctx, "", 1)
	if err != nil {
		return nil, err
	}
	if len(users) > 0 {
		problems = append(problems, fmt.Sprintf("the new cell holds the SCIM row of %s already", users[0].Name))
	}
	return problems, nil
}

// Unprovisioned implements [attach.People].
func (p *people) Unprovisioned(ctx context.Context) ([]attach.Account, error) {
	s, err := p.open(ctx)
	if err != nil {
		return nil, err
	}
	list, err := signin.ListUnprovisioned(ctx, s)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.listed = map[string]signin.Unprovisioned{}
	var out []attach.Account
	for _, u := range list {
		id := u.Subject
		if u.Issuer != "" {
			id += " of " + u.Issuer
		}
		p.listed[id] = u
		out = append(out, attach.Account{ID: id, Why: u.Why})
	}
	return out, nil
}

// Revoke implements [attach.People].
func (p *people) Revoke(ctx context.Context, accounts []attach.Account, before time.Time) error {
	s, err := p.open(ctx)
	if err != nil {
		return err
	}
	var list []signin.Unprovisioned
	p.mu.Lock()
	for _, a := range accounts {
		u, ok := p.listed[a.ID]
		if !ok {
			p.mu.Unlock()
			return fmt.Errorf("%w: account %s was not listed", cells.ErrInvalid, a.ID)
		}
		list = append(list, u)
	}
	p.mu.Unlock()
	return signin.Revoke(ctx, s, list, before)
}
