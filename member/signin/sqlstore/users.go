// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/signin"
)

const userColumns = `id, name, email, email_key, external, active, attributes, version, created, changed`

func scanUser(scan func(...any) error) (u signin.User, err error) {
	var active, created, changed int64
	var attributes string
	err = scan(&u.ID, &u.Name, &u.Email, &u.Key, &u.External, &active, &attributes, &u.Version, &created, &changed)
	u.Active, u.Attributes, u.Created, u.Changed = active != 0, []byte(attributes), at(created), at(changed)
	return u, err
}

// checkUser fills in the key.
func checkUser(u *signin.User) (err error) {
	if u.Name == "" || len(u.Attributes) == 0 {
		return fmt.Errorf("%w: a user needs a name and attributes", cells.ErrInvalid)
	}
	if u.Email, err = signin.NormalEmail(u.Email); err != nil {
		return err
	}
	u.Key, err = signin.KeyOf(u.Email)
	return err
}

func (s *Store) setWork(ctx context.Context, tx *sql.Tx, u *signin.User) error {
	if _, err := s.exec(ctx, tx, `DELETE FROM user_work WHERE user_id = ?`, u.ID); err != nil {
		return err
	}
	for _, k := range u.Work {
		if _, err := s.exec(ctx, tx, `INSERT INTO user_work (user_id, email_key) VALUES (?, ?) ON CONFLICT DO NOTHING`, u.ID, k); err != nil {
			return err
		}
	}
	return nil
}

// CreateUser implements [signin.Store].
func (s *Store) CreateUser(ctx context.Context, u signin.User) (signin.User, error) {
	err := checkUser(&u)
	if err == nil {
		u.ID, err = newID()
	}
	if err != nil {
		return signin.User{}, s.told("create user", err)
	}
	u.Version, u.Created = 1, now()
	u.Changed = u.Created
	err = s.change(ctx, "create user", func(tx *sql.Tx) error {
		if _, err := s.exec(ctx, tx, `INSERT INTO users (`+userColumns+`, name_key) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			u.ID, u.Name, u.Email, u.Key, u.External, flag(u.Active), string(u.Attributes), u.Version, micros(u.Created), micros(u.Changed), strings.ToLower(u.Name)); err != nil {
			return err
		}
		if _, err := s.exec(ctx, tx, `DELETE FROM tombstones WHERE email_key = ?`, u.Key); err != nil {
			return err
		}
		return s.setWork(ctx, tx, &u)
	})
	if err != nil {
		return signin.User{}, err
	}
	return u, nil
}

// UpdateUser implements [signin.Store].
func (s *Store) UpdateUser(ctx context.Context, u signin.User) (signin.User, error) {
	if err := checkUser(&u); err != nil {
		return signin.User{}, s.told("update user", err)
	}
	u.Changed = now()
	err := s.change(ctx, "update user", func(tx *sql.Tx) error {
		var was signin.EmailKey
		var left string
		var created int64
		if err := tx.QueryRowContext(ctx, s.q(`SELECT email_key, email, created FROM users WHERE id = ?`), u.ID).Scan(&was, &left, &created); err != nil {
			return err
		}
		u.Created = at(created)
		n, err := s.exec(ctx, tx, `UPDATE users SET name = ?, name_key = ?, email = ?, email_key = ?, external = ?, active = ?, attributes = ?, version = version + 1, changed = ?
			WHERE id = ? AND version = ? AND email_key = ?`,
			u.Name, strings.ToLower(u.Name), u.Email, u.Key, u.External, flag(u.Active), string(u.Attributes), micros(u.Changed), u.ID, u.Version, was)
		switch {
		case err != nil:
			return err
		case n == 0:
			return signin.ErrChanged
		}
		if was != u.Key {
			if err := s.bury(ctx, tx, was); err != nil {
				return err
			}
			if _, err := s.exec(ctx, tx, `DELETE FROM tombstones WHERE email_key = ?`, u.Key); err != nil {
				return err
			}
			if err := s.follow(ctx, tx, left, u.Email); err != nil {
				return err
			}
		}
		return s.setWork(ctx, tx, &u)
	})
	if err != nil {
		return signin.User{}, err
	}
	u.Version++
	return u, nil
}

// follow gives the accounts with an email the one that came in its place.
func (s *Store) follow(ctx context.Context, tx *sql.Tx, left, now string) error {
	if _, err := s.exec(ctx, tx, `INSERT INTO account_emails (issuer, subject, email)
		SELECT issuer, subject, CAST(? AS TEXT) FROM account_emails WHERE email = ? ON CONFLICT DO NOTHING`, now, left); err != nil {
		return err
	}
	_, err := s.exec(ctx, tx, `DELETE FROM account_emails WHERE email = ?`, left)
	return err
}

// bury keeps an email as deleted.
func (s *Store) bury(ctx context.Context, tx *sql.Tx, key signin.EmailKey) error {
	_, err := s.exec(ctx, tx, `INSERT INTO tombstones (email_key, at) VALUES (?, ?) ON CONFLICT (email_key) DO UPDATE SET at = excluded.at`, key, micros(now()))
	return err
}

// DeleteUser implements [signin.Store].
func (s *Store) DeleteUser(ctx context.Context, id string) error {
	return s.change(ctx, "delete user", func(tx *sql.Tx) error {
		var key signin.EmailKey
		if err := tx.QueryRowContext(ctx, s.q(`DELETE FROM users WHERE id = ? RETURNING email_key`), id).Scan(&key); err != nil {
			return err
		}
		return s.bury(ctx, tx, key)
	})
}

func (s *Store) user(ctx context.Context, where string, arg any) (signin.User, error) {
	u, err := scanUser(s.db.QueryRowContext(ctx, s.q(`SELECT `+userColumns+` FROM users WHERE `+where), arg).Scan)
	if err != nil {
		return signin.User{}, s.told("user", err)
	}
	return u, nil
}

// User implements [signin.Store].
func (s *Store) User(ctx context.Context, id string) (signin.User, error) {
	return s.user(ctx, `id = ?`, id)
}

// UserNamed implements [signin.Store].
func (s *Store) UserNamed(ctx context.Context, name string) (signin.User, error) {
	return s.user(ctx, `name_key = ?`, strings.ToLower(name))
}

// Users implements [signin.Store].
func (s *Store) Users(ctx context.Context, after string, limit int) (out []signin.User, err error) {
	err = s.each(ctx, s.db, func(scan func(...any) error) error {
		u, err := scanUser(scan)
		out = append(out, u)
		return err
	}, `SELECT `+userColumns+` FROM users WHERE id > ? ORDER BY id LIMIT ?`, after, pageSize(limit))
	return out, s.told("users", err)
}

// Rows implements [signin.Store].
func (s *Store) Rows(ctx context.Context, keys []signin.EmailKey) (out []signin.Row, err error) {
	if len(keys) == 0 {
		return nil, nil
	}
	in := `(?` + strings.Repeat(`, ?`, len(keys)-1) + `)`
	var args []any
	for range 2 {
		for _, k := range keys {
			args = append(args, k)
		}
	}
	err = s.each(ctx, s.db, func(scan func(...any) error) error {
		var r signin.Row
		var active int64
		err := scan(&r.Key, &active)
		r.Active = active != 0
		out = append(out, r)
		return err
	}, `SELECT email_key, active FROM users WHERE email_key IN `+in+` UNION ALL SELECT email_key, 0 FROM tombstones WHERE email_key IN `+in, args...)
	return out, s.told("rows", err)
}

// WorkOf implements [signin.Store].
func (s *Store) WorkOf(ctx context.Context, key signin.EmailKey) (out []signin.EmailKey, err error) {
	err = s.each(ctx, s.db, func(scan func(...any) error) error {
		var k signin.EmailKey
		err := scan(&k)
		out = append(out, k)
		return err
	}, `SELECT u.email_key FROM user_work w JOIN users u ON u.id = w.user_id WHERE w.email_key = ? AND u.active = 1`, key)
	return out, s.told("work addresses", err)
}
