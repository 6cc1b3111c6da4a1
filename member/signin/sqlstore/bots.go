// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/signin"
)

const botColumns = `name, key, thumbprint, admin, disabled, created`

func scanBot(scan func(...any) error) (b signin.Bot, err error) {
	var key string
	var admin, disabled, created int64
	err = scan(&b.Name, &key, &b.Thumbprint, &admin, &disabled, &created)
	b.Key, b.Admin, b.Disabled, b.Created = []byte(key), admin != 0, disabled != 0, at(created)
	return b, err
}

// write puts an entry into the audit.
func (s *Store) write(ctx context.Context, db querier, e signin.Entry) error {
	id, err := newID()
	if err != nil {
		return err
	}
	_, err = s.exec(ctx, db, `INSERT INTO audit (id, at, actor, action, detail) VALUES (?, ?, ?, ?, ?)`, id, micros(now()), e.Actor, e.Action, e.Detail)
	return err
}

// PutBot implements [signin.Store].
func (s *Store) PutBot(ctx context.Context, b signin.Bot, e signin.Entry) error {
	if b.Name == "" || len(b.Key) == 0 || b.Thumbprint == "" {
		return fmt.Errorf("%w: signin: a bot needs a name and a key", cells.ErrInvalid)
	}
	return s.change(ctx, "bot", func(tx *sql.Tx) error {
		if _, err := s.exec(ctx, tx, `INSERT INTO bots (`+botColumns+`) VALUES (?, ?, ?, ?, ?, ?)
			ON CONFLICT (name) DO UPDATE SET key = excluded.key, thumbprint = excluded.thumbprint, admin = excluded.admin, disabled = excluded.disabled`,
			b.Name, string(b.Key), b.Thumbprint, flag(b.Admin), flag(b.Disabled), micros(now())); err != nil {
			return err
		}
		// What an earlier key opened is closed.
		for _, t := range []string{"challenges", "bot_tokens"} {
			if _, err := s.exec(ctx, tx, `DELETE FROM `+t+` WHERE bot = ?`, b.Name); err != nil {
				return err
			}
		}
		return s.write(ctx, tx, e)
	})
}

// Bot implements [signin.Store].
func (s *Store) Bot(ctx context.Context, name string) (signin.Bot, error) {
	b, err := scanBot(s.db.QueryRowContext(ctx, s.q(`SELECT `+botColumns+` FROM bots WHERE name = ?`), name).Scan)
	return b, s.told("bot", err)
}

// Bots implements [signin.Store].
func (s *Store) Bots(ctx context.Context) (out []signin.Bot, err error) {
	err = s.each(ctx, s.db, func(scan func(...any) error) error {
		b, err := scanBot(scan)
		out = append(out, b)
		return err
	}, `SELECT `+botColumns+` FROM bots ORDER BY name`)
	return out, s.told("bots", err)
}

// Challenge implements [signin.Store]. It also drops what has expired.
func (s *Store) Challenge(ctx context.Context, hash [32]byte, bot string, expires time.Time) error {
	return s.change(ctx, "challenge", func(tx *sql.Tx) error {
		for _, t := range []string{"challenges", "bot_tokens"} {
			if _, err := s.exec(ctx, tx, `DELETE FROM `+t+` WHERE expires < ?`, micros(now().Add(-time.Minute))); err != nil {
				return err
			}
		}
		_, err := s.exec(ctx, tx, `INSERT INTO challenges (hash, bot, expires) VALUES (?, ?, ?)`, hex.EncodeToString(hash[:]), bot, micros(expires))
		return err
	})
}

// Answered implements [signin.Store].
func (s *Store) Answered(ctx context.Context, challenge [32]byte, bot string, now time.Time, token [32]byte, expires time.Time, e signin.Entry) error {
	return s.change(ctx, "an answered challenge", func(tx *sql.Tx) error {
		n, err := s.exec(ctx, tx, `DELETE FROM challenges WHERE hash = ? AND bot = ? AND expires > ?`, hex.EncodeToString(challenge[:]), bot, micros(now))
		switch {
		case err != nil:
			return err
		case n != 1:
			return cells.ErrNotFound
		}
		if _, err := s.exec(ctx, tx, `INSERT INTO bot_tokens (hash, bot, expires) VALUES (?, ?, ?)`, hex.EncodeToString(token[:]), bot, micros(expires)); err != nil {
			return err
		}
		return s.write(ctx, tx, e)
	})
}

// BotToken implements [signin.Store].
func (s *Store) BotToken(ctx context.Context, token [32]byte, now time.Time, e signin.Entry) (b signin.Bot, err error) {
	err = s.change(ctx, "a bot's token", func(tx *sql.Tx) error {
		if b, err = scanBot(tx.QueryRowContext(ctx, s.q(`SELECT b.name, b.key, b.thumbprint, b.admin, b.disabled, b.created FROM bot_tokens t JOIN bots b ON b.name = t.bot WHERE t.hash = ? AND t.expires > ? AND b.disabled = 0`),
			hex.EncodeToString(token[:]), micros(now)).Scan); err != nil {
			return err
		}
		if e.Actor == "" {
			e.Actor = "sa:" + b.Name
		}
		return s.write(ctx, tx, e)
	})
	if err != nil {
		return signin.Bot{}, err
	}
	return b, nil
}

// Audit implements [signin.Store].
func (s *Store) Audit(ctx context.Context, after string, limit int) (out []signin.Entry, err error) {
	err = s.each(ctx, s.db, func(scan func(...any) error) error {
		var e signin.Entry
		var when int64
		err := scan(&e.ID, &when, &e.Actor, &e.Action, &e.Detail)
		e.At = at(when)
		out = append(out, e)
		return err
	}, `SELECT id, at, actor, action, detail FROM audit WHERE id > ? ORDER BY id LIMIT ?`, after, pageSize(limit))
	return out, s.told("audit", err)
}
