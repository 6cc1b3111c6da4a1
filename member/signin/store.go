// SPDX-License-Identifier: Apache-2.0

package signin

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// ErrTaken: another row has the name or the email. Returned by the store's writes of
// users and groups.
var ErrTaken = errors.New("signin: taken")

// ErrChanged: the row is not at the version that was read. Returned by updates.
var ErrChanged = errors.New("signin: changed meanwhile")

// User is a person that the cell's identity provider provisions.
type User struct {
	// ID is the resource's, made by the store.
	ID string
	// Name is the userName; no two have one that differs in case alone.
	Name string
	// Email is the primary email, normal; Key is its key. No two users have one.
	Email string
	Key   EmailKey
	// Work are the keys of the other addresses that are marked as work. They are written
	// with the user and found by WorkOf; a user that is read has none.
	Work []EmailKey
	// External is the provider's own id.
	External string
	Active   bool
	// Attributes is the resource as the provider wrote it.
	Attributes json.RawMessage
	// Version grows with each write, from 1.
	Version          int64
	Created, Changed time.Time
}

// Row is what the cell's SCIM holds for an email.
type Row struct {
	Key    EmailKey
	Active bool // of a user; a deleted one is not
}

// Group is a group of a tenant.
type Group struct {
	Tenant cells.TenantID
	// ID is the resource's, made by the store. Name is unique in the tenant.
	ID, Name, External string
	Attributes         json.RawMessage
	Version            int64
	Created, Changed   time.Time
}

// Account is one who has signed in to the cell: a person's subject at an issuer.
type Account struct {
	Issuer, Subject string
	// Emails are contact and verified ones, normal.
	Emails []string
	Closed bool
	// LastIssued is when the newest token that was seen was issued; what was issued
	// before Revoked is refused.
	LastIssued, Revoked time.Time
}

// Live reports whether a token of the account may still be used: one issued after it
// was revoked was seen, or it never was.
func (a *Account) Live() bool { return !a.Closed && !a.LastIssued.Before(a.Revoked) }

// ServiceAccount is a personal service account: sa:<Name> acts for its creator.
type ServiceAccount struct {
	Name string
	// Creator is the subject that made it, Lineage every further one that it acts for.
	Creator string
	Lineage []string
	Created time.Time
	Revoked time.Time // what was issued before is refused
}

// Bot is a machine identity that proves itself with a key. It has no email, and SCIM
// never revokes it.
type Bot struct {
	Name string
	// Key is its public key, a JSON Web Key; Thumbprint is the key's (RFC 7638, SHA-256,
	// base64url).
	Key        json.RawMessage
	Thumbprint string
	// Admin may act in every tenant of the cell.
	Admin    bool
	Disabled bool
	Created  time.Time
}

// Entry is a line of the audit: a use of a bot, a change of one.
type Entry struct {
	// ID orders entries by time.
	ID     string    `json:"id"`
	At     time.Time `json:"at"`
	Actor  string    `json:"actor"`
	Action string    `json:"action"`
	Detail string    `json:"detail,omitempty"`
}

// Store keeps what a cell knows of its people, in the cell's database. Safe for
// concurrent use. A write has been made when it returns nil, is durable then, and has
// changed nothing otherwise, but for [cells.ErrUnavailable] after a lost connection.
// Errors wrap cells.ErrNotFound, [ErrTaken], [ErrChanged], cells.ErrInvalid or
// cells.ErrUnavailable.
type Store interface {
	// CreateUser makes a user with a new ID and version 1. It takes back the deletion of
	// its email.
	CreateUser(ctx context.Context, u User) (User, error)
	// UpdateUser replaces the user with the ID and the Version of u. An email that is
	// left is kept as deleted, and the accounts that have it have the new one in its place.
	UpdateUser(ctx context.Context, u User) (User, error)
	// DeleteUser deletes a user; its email is kept as deleted.
	DeleteUser(ctx context.Context, id string) error
	User(ctx context.Context, id string) (User, error)
	// UserNamed finds a user by name, in any case.
	UserNamed(ctx context.Context, name string) (User, error)
	// Users lists users by ID, those after the given one.
	Users(ctx context.Context, after string, limit int) ([]User, error)
	// Rows returns what there is for the emails, in one look: active, inactive and
	// deleted ones; nothing for an email that was never provisioned.
	Rows(ctx context.Context, keys []EmailKey) ([]Row, error)
	// WorkOf returns the keys of the active users that have the email as a work address.
	WorkOf(ctx context.Context, key EmailKey) ([]EmailKey, error)

	CreateGroup(ctx context.Context, g Group) (Group, error)
	UpdateGroup(ctx context.Context, g Group) (Group, error)
	DeleteGroup(ctx context.Context, tenant cells.TenantID, id string) error
	Group(ctx context.Context, tenant cells.TenantID, id string) (Group, error)
	Groups(ctx context.Context, tenant cells.TenantID, after string, limit int) ([]Group, error)

	// RecordAccount makes an account or adds to it: emails, and a later LastIssued. It
	// takes back neither Closed nor Revoked.
	RecordAccount(ctx context.Context, a Account) error
	// AccountsOf lists the accounts of a subject, at one issuer, or with "" at any.
	AccountsOf(ctx context.Context, issuer, subject string) ([]Account, error)
	// Accounts lists all, after the given one, in an order of the store's.
	Accounts(ctx context.Context, after Account, limit int) ([]Account, error)
	// RevokeAccount refuses what was issued to an account before a time; an earlier time
	// than it has changes nothing.
	RevokeAccount(ctx context.Context, issuer, subject string, before time.Time) error

	PutServiceAccount(ctx context.Context, s ServiceAccount) error
	ServiceAccount(ctx context.Context, name string) (ServiceAccount, error)
	ServiceAccounts(ctx context.Context, after string, limit int) ([]ServiceAccount, error)
	RevokeServiceAccount(ctx context.Context, name string, before time.Time) error

	// PutBot makes a bot, or gives it another key, and writes the entry with it.
	PutBot(ctx context.Context, b Bot, e Entry) error
	Bot(ctx context.Context, name string) (Bot, error)
	Bots(ctx context.Context) ([]Bot, error)
	// Challenge keeps the SHA-256 of a challenge for a bot until it expires.
	Challenge(ctx context.Context, hash [32]byte, bot string, expires time.Time) error
	// Answered uses a challenge up, writes the entry and keeps the SHA-256 of a token, all
	// or nothing; cells.ErrNotFound when the challenge is not there, of another bot, used
	// or expired at the time now.
	Answered(ctx context.Context, challenge [32]byte, bot string, now time.Time, token [32]byte, expires time.Time, e Entry) error
	// BotToken returns the bot of a token that has not expired, and writes the entry.
	BotToken(ctx context.Context, token [32]byte, now time.Time, e Entry) (Bot, error)
	// Audit lists entries after an ID, the oldest first.
	Audit(ctx context.Context, after string, limit int) ([]Entry, error)

	Close() error
}
