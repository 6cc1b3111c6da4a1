// SPDX-License-Identifier: Apache-2.0

package signin

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Unprovisioned is a live account, or a personal service account, that an enforced cell
// with SCIM on would refuse.
type Unprovisioned struct {
	// Issuer and Subject name an account; of a service account the issuer is "" and the
	// subject sa:<name>.
	Issuer, Subject string
	Why             string
}

// ListUnprovisioned looks at every account of a store. The order is the store's.
// Errors are the store's.
func ListUnprovisioned(ctx context.Context, store Store) (out []Unprovisioned, err error) {
	p, err := NewCheck(CheckConfig{Store: store, Need: func(context.Context) (Need, error) { return NeedActive, nil }, CacheFor: -1})
	if err != nil {
		return nil, err
	}
	look := func(s Subject) error {
		err := p.Refuses(ctx, s)
		if errors.Is(err, ErrRefused) {
			out = append(out, Unprovisioned{s.Issuer, s.Name, cells.AnswerOf(err).Detail})
			return nil
		}
		return err
	}
	for after := (Account{}); ; {
		list, err := store.Accounts(ctx, after, 500)
		if err != nil {
			return nil, err
		}
		if len(list) == 0 {
			break
		}
		for _, a := range list {
			if a.Live() {
				// As of a token that is issued now: what was issued before a revocation is dead.
				if err := look(Subject{Issuer: a.Issuer, Name: a.Subject, IssuedAt: p.cfg.Now()}); err != nil {
					return nil, err
				}
			}
		}
		after = list[len(list)-1]
	}
	for after := ""; ; {
		list, err := store.ServiceAccounts(ctx, after, 500)
		if err != nil {
			return nil, err
		}
		if len(list) == 0 {
			return out, nil
		}
		for _, a := range list {
			if a.Revoked.IsZero() {
				if err := look(Subject{Name: "sa:" + a.Name, IssuedAt: p.cfg.Now()}); err != nil {
					return nil, err
				}
			}
		}
		after = list[len(list)-1].Name
	}
}

// Revoke refuses what was issued to accounts before a time. A second run changes
// nothing.
func Revoke(ctx context.Context, store Store, list []Unprovisioned, before time.Time) error {
	for _, u := range list {
		var err error
		if name, ok := serviceName(u.Subject); ok && u.Issuer == "" {
			err = store.RevokeServiceAccount(ctx, name, before)
		} else {
			err = store.RevokeAccount(ctx, u.Issuer, u.Subject, before)
		}
		if err != nil && !errors.Is(err, cells.ErrNotFound) {
			return fmt.Errorf("revoking %s: %w", u.Subject, err)
		}
	}
	return nil
}
