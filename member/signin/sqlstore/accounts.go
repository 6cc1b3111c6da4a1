// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/signin"
)

// RecordAccount implements [signin.Store].
func (s *Store) RecordAccount(ctx context.Context, a signin.Account) error {
	if a.Issuer == "" || a.Subject == "" {
		return fmt.Errorf("%w: signin: an account needs an issuer and a subject", cells.ErrInvalid)
	}
	return s.change(ctx, "record account", func(tx *sql.Tx) error {
		if _, err := s.exec(ctx, tx, `INSERT INTO accounts (issuer, subject, closed, last_issued, revoked) VALUES (?, ?, ?, ?, ?)
			ON CONFLICT (issuer, subject) DO UPDATE SET
				closed = CASE WHEN excluded.closed > accounts.closed THEN excluded.closed ELSE accounts.closed END,
				last_issued = CASE WHEN excluded.last_issued > accounts.last_issued THEN excluded.last_issued ELSE accounts.last_issued END,
				revoked = CASE WHEN excluded.revoked > accounts.revoked THEN excluded.revoked ELSE accounts.revoked END`,
			a.Issuer, a.Subject, flag(a.Closed), micros(a.LastIssued), micros(a.Revoked)); err != nil {
			return err
		}
		for _, e := range a.Emails {
			n, err := signin.NormalEmail(e)
			if err != nil {
				return err
			}
			if _, err := s.exec(ctx, tx, `INSERT INTO account_emails (issuer, subject, email) VALUES (?, ?, ?) ON CONFLICT DO NOTHING`, a.Issuer, a.Subject, n); err != nil {
				return err
			}
		}
		return nil
	})
}

// accounts lists accounts, each with its emails in order.
func (s *Store) accounts(ctx context.Context, what, from string, args ...any) (out []signin.Account, err error) {
	err = s.each(ctx, s.db, func(scan func(...any) error) error {
		var a signin.Account
		var closed, issued, revoked int64
		var email sql.NullString
		if err := scan(&a.Issuer, &a.Subject, &closed, &issued, &revoked, &email); err != nil {
			return err
		}
		a.Closed, a.LastIssued, a.Revoked = closed != 0, at(issued), at(revoked)
		if n := len(out); n == 0 || out[n-1].Issuer != a.Issuer || out[n-1].Subject != a.Subject {
			out = append(out, a)
		}
		if email.Valid {
			last := &out[len(out)-1]
			last.Emails = append(last.Emails, email.String)
		}
		return nil
	}, `SELECT a.issuer, a.subject, a.closed, a.last_issued, a.revoked, e.email FROM (`+from+`) a
		LEFT JOIN account_emails e ON e.issuer = a.issuer AND e.subject = a.subject ORDER BY a.issuer, a.subject, e.email`, args...)
	return out, s.told(what, err)
}

// AccountsOf implements [signin.Store].
func (s *Store) AccountsOf(ctx context.Context, issuer, subject string) ([]signin.Account, error) {
	if issuer == "" {
		return s.accounts(ctx, "accounts of a subject", `SELECT * FROM accounts WHERE subject = ?`, subject)
	}
	return s.accounts(ctx, "accounts of a subject", `SELECT * FROM accounts WHERE subject = ? AND issuer = ?`, subject, issuer)
}

// Accounts implements [signin.Store].
func (s *Store) Accounts(ctx context.Context, after signin.Account, limit int) ([]signin.Account, error) {
	return s.accounts(ctx, "accounts", `SELECT * FROM accounts WHERE (issuer, subject) > (?, ?) ORDER BY issuer, subject LIMIT ?`, after.Issuer, after.Subject, pageSize(limit))
}

// RevokeAccount implements [signin.Store].
func (s *Store) RevokeAccount(ctx context.Context, issuer, subject string, before time.Time) error {
	n, err := s.exec(ctx, s.db, `UPDATE accounts SET revoked = CASE WHEN revoked > ? THEN revoked ELSE ? END WHERE issuer = ? AND subject = ?`, micros(before), micros(before), issuer, subject)
	if err == nil && n == 0 {
		err = cells.ErrNotFound
	}
	return s.told("revoke account", err)
}

// PutServiceAccount implements [signin.Store].
func (s *Store) PutServiceAccount(ctx context.Context, a signin.ServiceAccount) error {
	if a.Name == "" || a.Creator == "" {
		return fmt.Errorf("%w: signin: a service account needs a name and a creator", cells.ErrInvalid)
	}
	lineage, err := json.Marshal(a.Lineage)
	if err != nil {
		return fmt.Errorf("%w: signin: %w", cells.ErrInvalid, err)
	}
	_, err = s.exec(ctx, s.db, `INSERT INTO service_accounts (name, creator, lineage, created, revoked) VALUES (?, ?, ?, ?, ?)
		ON CONFLICT (name) DO UPDATE SET creator = excluded.creator, lineage = excluded.lineage`, a.Name, a.Creator, string(lineage), micros(now()), micros(a.Revoked))
	return s.told("service account", err)
}

func scanService(scan func(...any) error) (a signin.ServiceAccount, err error) {
	var lineage string
	var created, revoked int64
	if err := scan(&a.Name, &a.Creator, &lineage, &created, &revoked); err != nil {
		return a, err
	}
	a.Created, a.Revoked = at(created), at(revoked)
	return a, json.Unmarshal([]byte(lineage), &a.Lineage)
}

// ServiceAccount implements [signin.Store].
func (s *Store) ServiceAccount(ctx context.Context, name string) (signin.ServiceAccount, error) {
	a, err := scanService(s.db.QueryRowContext(ctx, s.q(`SELECT name, creator, lineage, created, revoked FROM service_accounts WHERE name = ?`), name).Scan)
	return a, s.told("service account", err)
}

// ServiceAccounts implements [signin.Store].
func (s *Store) ServiceAccounts(ctx context.Context, after string, limit int) (out []signin.ServiceAccount, err error) {
	err = s.each(ctx, s.db, func(scan func(...any) error) error {
		a, err := scanService(scan)
		out = append(out, a)
		return err
	}, `SELECT name, creator, lineage, created, revoked FROM service_accounts WHERE name > ? ORDER BY name LIMIT ?`, after, pageSize(limit))
	return out, s.told("service accounts", err)
}

// RevokeServiceAccount implements [signin.Store].
func (s *Store) RevokeServiceAccount(ctx context.Context, name string, before time.Time) error {
	n, err := s.exec(ctx, s.db, `UPDATE service_accounts SET revoked = CASE WHEN revoked > ? THEN revoked ELSE ? END WHERE name = ?`, micros(before), micros(before), name)
	if err == nil && n == 0 {
		err = cells.ErrNotFound
	}
	return s.told("revoke service account", err)
}
