// SPDX-License-Identifier: Apache-2.0

package signin

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Need is what a cell asks of its SCIM before a person acts.
type Need int

const (
	// NeedNothing: SCIM is off. Revoked tokens are refused, and nobody else.
	NeedNothing Need = iota
	// NeedNotGone refuses who was deactivated or deleted: SCIM is on in a deployment that
	// is no cell, or in a cell that is not enforced yet.
	NeedNotGone
	// NeedActive refuses everybody who has no active row: SCIM is on in an enforced cell.
	NeedActive
)

// ErrRefused: a person may not act in the cell. Returned by [Check.Refuses], wrapped
// in an answer FORBIDDEN.
var ErrRefused = errors.New("signin: refused")

// CheckConfig is what [NewCheck] works with; Store and Need are required.
type CheckConfig struct {
	Store Store
	// Need says what is asked now; an error counts as a store that does not answer.
	Need func(context.Context) (Need, error)
	// CacheFor is how long it is remembered that a token passed; 5 s by default. So long
	// may a person act on after a deactivation. Negative: not at all.
	CacheFor time.Duration
	// Timeout bounds a look; 5 s by default.
	Timeout time.Duration
	// Now is the clock; time.Now by default.
	Now func() time.Time
}

// Check says whether somebody may act, by the cell's SCIM. Safe for concurrent use.
type Check struct {
	cfg CheckConfig

	mu     sync.Mutex // guards what follows
	passed map[passKey]time.Time
}

// passKey is what a pass is remembered by.
type passKey struct{ who, email string }

// maxPassed bounds what is remembered; beyond it all is forgotten.
const maxPassed = 50_000

// maxLineage bounds how many subjects are checked for one.
const maxLineage = 32

// NewCheck makes the check. The error wraps [cells.ErrInvalid].
func NewCheck(cfg CheckConfig) (*Check, error) {
	if cfg.Store == nil || cfg.Need == nil {
		return nil, fmt.Errorf("%w: signin: a store and what is needed are required", cells.ErrInvalid)
	}
	if cfg.CacheFor == 0 {
		cfg.CacheFor = 5 * time.Second
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = 5 * time.Second
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Check{cfg: cfg, passed: map[passKey]time.Time{}}, nil
}

// Subject is somebody to be checked.
type Subject struct {
	// Issuer is whose subject it is; "" for any.
	Issuer string
	// Kind is the issuer's. The zero value is People.
	Kind Kind
	Name string
	// Email is one that the issuer verified.
	Email string
	// IssuedAt is when the credential was issued; zero when it does not say.
	IssuedAt time.Time
}

// Admit checks everybody whom a verified token stands for: its subject, those who act,
// and who made it. A person who passes has an account from then on. The error is a
// [*cells.Answer]: FORBIDDEN, UNAUTHENTICATED for a token that was revoked, or
// AUTH_UNAVAILABLE when the store does not answer.
func (p *Check) Admit(ctx context.Context, t Token) error {
	key := passKey{strings.Join(append([]string{t.Issuer, string(t.Kind), t.Subject, t.Creator, t.IssuedAt.String(), string(t.Tenant)}, t.Actors...), "\x00"), t.Email}
	begun := p.cfg.Now()
	known := false // the account has this token already
	if p.cfg.CacheFor > 0 {
		p.mu.Lock()
		at, ok := p.passed[key]
		p.mu.Unlock()
		if ok && begun.Sub(at) < p.cfg.CacheFor {
			return nil
		}
		known = ok
	}
	ctx, cancel := context.WithTimeout(ctx, p.cfg.Timeout)
	defer cancel()
	subjects := []Subject{{Issuer: t.Issuer, Kind: t.Kind, Name: t.Subject, Email: t.Email, IssuedAt: t.IssuedAt}}
	for _, a := range t.Actors {
		subjects = append(subjects, Subject{Issuer: t.Issuer, Kind: t.Kind, Name: a, IssuedAt: t.IssuedAt})
	}
	if t.Creator != "" {
		subjects = append(subjects, Subject{Name: t.Creator, IssuedAt: t.IssuedAt})
	}
	for _, s := range subjects {
		if err := p.Refuses(ctx, s); err != nil {
			return err
		}
	}
	if _, isService := serviceName(t.Subject); t.Kind == People && !isService && !known {
		a := Account{Issuer: t.Issuer, Subject: t.Subject, LastIssued: t.IssuedAt}
		if t.Email != "" {
			if n, err := NormalEmail(t.Email); err == nil {
				a.Emails = []string{n}
			}
		}
		if err := p.cfg.Store.RecordAccount(ctx, a); err != nil {
			return unavailable(err)
		}
	}
	if p.cfg.CacheFor > 0 {
		p.mu.Lock()
		if len(p.passed) >= maxPassed {
			clear(p.passed)
		}
		p.passed[key] = begun
		p.mu.Unlock()
	}
	return nil
}

// serviceName is the name in sa:<name>, before any further colon.
func serviceName(subject string) (string, bool) {
	rest, ok := strings.CutPrefix(subject, "sa:")
	name, _, _ := strings.Cut(rest, ":")
	return name, ok
}

// Refuses is nil when somebody may act. Outside SCIM are a bot and its agents, the
// subjects of an issuer of machines and of an issuer of end users, and nobody else: a
// personal service account is checked through its creator and every subject of its
// lineage, and every other subject is a person, however it is spelled.
func (p *Check) Refuses(ctx context.Context, s Subject) error {
	need, err := p.cfg.Need(ctx)
	if err != nil {
		return unavailable(err)
	}
	left := maxLineage
	return p.refuses(ctx, need, s, &left)
}

func (p *Check) refuses(ctx context.Context, need Need, s Subject, left *int) error {
	if *left--; *left < 0 {
		return refused("the lineage is too long")
	}
	if s.Kind == EndUsers || s.Kind == Machines {
		return nil
	}
	name, ok := serviceName(s.Name)
	if !ok {
		return p.person(ctx, need, s)
	}
	bot, err := p.cfg.Store.Bot(ctx, name)
	switch {
	case err == nil && bot.Disabled:
		return refused("the bot is disabled")
	case err == nil:
		return nil
	case !errors.Is(err, cells.ErrNotFound):
		return unavailable(err)
	}
	sa, err := p.cfg.Store.ServiceAccount(ctx, name)
	switch {
	case errors.Is(err, cells.ErrNotFound) && need == NeedActive:
		return refused("there is no such service account, and it has no creator")
	case errors.Is(err, cells.ErrNotFound):
		return nil
	case err != nil:
		return unavailable(err)
	case revoked(s.IssuedAt, sa.Revoked):
		return wasRevoked()
	}
	for _, of := range append([]string{sa.Creator}, sa.Lineage...) {
		// The account of the creator may be revoked; the service account's own tokens were
		// issued by whoever made them.
		if err := p.refuses(ctx, need, Subject{Name: of, IssuedAt: s.IssuedAt}, left); err != nil {
			return err
		}
	}
	return nil
}

// person checks all emails of a person.
func (p *Check) person(ctx context.Context, need Need, s Subject) error {
	accounts, err := p.cfg.Store.AccountsOf(ctx, s.Issuer, s.Name)
	if err != nil {
		return unavailable(err)
	}
	for i := range accounts {
		if revoked(s.IssuedAt, accounts[i].Revoked) {
			return wasRevoked()
		}
	}
	if need == NeedNothing {
		return nil
	}
	own := map[EmailKey]bool{}
	for _, e := range []string{s.Name, s.Email} {
		if k, err := KeyOf(e); err == nil {
			own[k] = true
		}
	}
	all := map[EmailKey]bool{}
	for k := range own {
		all[k] = true
	}
	for i := range accounts {
		if accounts[i].Closed {
			continue
		}
		for _, e := range accounts[i].Emails {
			if k, err := KeyOf(e); err == nil {
				all[k] = true
			}
		}
	}
	if len(all) == 0 {
		if need == NeedActive {
			return refused("the person has no email, and no account with one")
		}
		return nil
	}
	keys := make([]EmailKey, 0, len(all))
	for k := range all {
		keys = append(keys, k)
	}
	rows, err := p.cfg.Store.Rows(ctx, keys)
	if err != nil {
		return unavailable(err)
	}
	has := map[EmailKey]bool{}
	for _, r := range rows {
		if !r.Active {
			return refused("SCIM has deactivated or deleted the person")
		}
		has[r.Key] = true
	}
	if need != NeedActive {
		return nil
	}
	for _, k := range keys {
		if has[k] {
			continue
		}
		// Good only as a work address of somebody whose primary email the subject has.
		of, err := p.cfg.Store.WorkOf(ctx, k)
		if err != nil {
			return unavailable(err)
		}
		ok := false
		for _, primary := range of {
			ok = ok || own[primary]
		}
		if !ok {
			return refused("SCIM has no active row of the person")
		}
	}
	return nil
}

// revoked reports whether what was issued then is refused. What does not say when it
// was issued counts as issued before.
func revoked(issued, before time.Time) bool { return !before.IsZero() && issued.Before(before) }

func refused(why string) error {
	return &cells.Answer{Code: cells.CodeForbidden, Detail: why, Err: ErrRefused}
}

func wasRevoked() error {
	return &cells.Answer{Code: cells.CodeUnauthenticated, Detail: "the token was revoked; sign in again", Err: ErrRefused}
}
