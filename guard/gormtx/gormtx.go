// SPDX-License-Identifier: Apache-2.0

package gormtx

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"
	"gorm.io/gorm/schema"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/internal/sqltx"
	"github.com/cloister-dev/cloister/guard/internal/txrun"
	"github.com/cloister-dev/cloister/guard/postgres"
	"github.com/cloister-dev/cloister/guard/sqlite"
)

var (
	// ErrNoTenantCondition: a write to a tenant table does not say for which tenant.
	// Nothing was written; it wraps [cells.ErrFenced].
	ErrNoTenantCondition = fmt.Errorf("%w: no tenant condition", cells.ErrFenced)
	// ErrNoTransaction: a statement that writes and returns rows was made outside of a
	// transaction. Nothing was written.
	ErrNoTransaction = errors.New("gormtx: a query that writes needs db.Transaction")
)

// Guard is the guard that a plugin works on: [*postgres.SQL] and [*sqlite.Guard]
// are. The caller stays its owner; its database must be the one that GORM uses.
type Guard interface {
	guard.Keeper
	Begin(ctx context.Context, opts *sql.TxOptions) (*sqltx.Tx, error)
	BeginUnadmitted(ctx context.Context, opts *sql.TxOptions) (*sqltx.Tx, error)
	Translate(err error) error
}

var (
	_ Guard = (*postgres.SQL)(nil)
	_ Guard = (*sqlite.Guard)(nil)
)

// Config configures a [Plugin].
type Config struct {
	// Tables are the tenant tables, as the guard is installed with; see [TablesOf].
	Tables []guard.Table
	// Retries is how often InTx runs a transaction again that was given up in favour
	// of another; 0 means 8, less never.
	Retries int

	// Switched off in mutation checks only.
	noCheck, noTriggers bool
}

// Plugin is the write guard. Make it with [New] and give it to one gorm.DB's Use.
// Safe for concurrent use.
type Plugin struct {
	g       Guard
	cfg     Config
	columns map[string]string // tenant column by table name
	outbox  []guard.Table
	sqlite  bool
}

// New returns a plugin. The error wraps [cells.ErrInvalid].
func New(g Guard, cfg Config) (*Plugin, error) {
	p := &Plugin{g: g, cfg: cfg, columns: map[string]string{}, outbox: g.MovedTables()}
	if cfg.Retries == 0 {
		p.cfg.Retries = 8
	}
	for _, t := range cfg.Tables {
		if t.Name == "" || t.TenantColumn == "" {
			return nil, fmt.Errorf("%w: gormtx: table %q needs a name and a tenant column", cells.ErrInvalid, t.Name)
		}
		p.columns[base(t.Name)] = t.TenantColumn
	}
	_, p.sqlite = g.(*sqlite.Guard)
	return p, nil
}

// base is a table's name without its schema, as it is compared: SQLite takes names in
// any case, and on Postgres two that differ in nothing else are treated alike.
func base(name string) string { return strings.ToLower(name[strings.LastIndexByte(name, '.')+1:]) }

// TablesOf lists the tables of models whose tenant field has the tag cell:"tenant",
// for [Config] and for the guard's Install:
//
//	type Note struct {
//		Tenant string `gorm:"primaryKey" cell:"tenant"`
//		Key    string `gorm:"primaryKey"`
//	}
//
// The error wraps [cells.ErrInvalid] when a model has no such field.
func TablesOf(db *gorm.DB, models ...any) ([]guard.Table, error) {
	var out []guard.Table
	for _, m := range models {
		stmt := &gorm.Statement{DB: db}
		if err := stmt.Parse(m); err != nil {
			return nil, fmt.Errorf("%w: gormtx: %T: %w", cells.ErrInvalid, m, err)
		}
		column := ""
		for _, f := range stmt.Schema.Fields {
			if f.Tag.Get("cell") == "tenant" {
				column = f.DBName
			}
		}
		if column == "" {
			return nil, fmt.Errorf("%w: gormtx: %T has no field with the tag cell:\"tenant\"", cells.ErrInvalid, m)
		}
		out = append(out, guard.Table{Name: stmt.Schema.Table, TenantColumn: column})
	}
	return out, nil
}

// Name implements [gorm.Plugin].
func (p *Plugin) Name() string { return "cloister:gormtx" }

// Initialize implements [gorm.Plugin]. It takes the place of the session's pool.
func (p *Plugin) Initialize(db *gorm.DB) error {
	inner, ok := db.ConnPool.(*sql.DB)
	if !ok || db.PrepareStmt {
		return fmt.Errorf("%w: gormtx: the session's pool is a %T; open GORM on a *sql.DB, without PrepareStmt", cells.ErrInvalid, db.ConnPool)
	}
	if got := db.Name() == "sqlite"; got != p.sqlite {
		return fmt.Errorf("%w: gormtx: the dialect is %s, the guard is a %T", cells.ErrInvalid, db.Name(), p.g)
	}
	own := &pool{p: p, db: inner}
	db.ConnPool = own
	db.Statement.ConnPool = own
	return p.register(db)
}

// InTx runs fn in a transaction that is admitted for the tenant of the context's
// admission, and commits it if fn returns nil. When ctx's session is in a
// transaction already, fn runs there, behind a savepoint. Otherwise fn runs again, in
// a new transaction, when the database gave this one up in favour of another: it
// must not change anything but the transaction and its own variables.
//
// After an error nothing was written, except after [guard.ErrCommitUnknown]. Errors are
// those of the guards' InTx; opts may be nil.
func (p *Plugin) InTx(ctx context.Context, db *gorm.DB, opts *sql.TxOptions, fn func(tx *gorm.DB) error) error {
	if t, ok := db.Statement.ConnPool.(*tx); ok {
		if t.t.Tenant == "" {
			return guard.ErrNoAdmission
		}
		return p.translate(db.WithContext(ctx).Transaction(fn))
	}
	for try := 0; ; try++ {
		err := p.once(ctx, db, opts, fn)
		if !guard.RetryHere(err) || try >= p.cfg.Retries || ctx.Err() != nil {
			return err
		}
		if err := txrun.Backoff(ctx, try); err != nil {
			return err
		}
	}
}

func (p *Plugin) once(ctx context.Context, db *gorm.DB, opts *sql.TxOptions, fn func(tx *gorm.DB) error) error {
	return p.translate(db.WithContext(ctx).Transaction(func(gtx *gorm.DB) error {
		t, ok := gtx.Statement.ConnPool.(*tx)
		if !ok || t.t.Tenant == "" {
			return guard.ErrNoAdmission
		}
		if err := fn(gtx); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return nil
	}, opts))
}

// of returns the guarded transaction that a session is in.
func of(db *gorm.DB) (*tx, error) {
	t, ok := db.Statement.ConnPool.(*tx)
	if !ok {
		return nil, fmt.Errorf("%w: the session is in no guarded transaction", cells.ErrFenced)
	}
	return t, nil
}

// Emit writes an event into the outbox, in the session's transaction, and returns its
// event_seq, which holds once that has committed. Emit last: until it ends no other
// transaction can emit for the tenant. Errors: [cells.ErrFenced] without an admission,
// [guard.ErrContended], [cells.ErrInvalid].
func Emit(db *gorm.DB, typ string, payload any) (cells.EventSeq, error) {
	t, err := of(db)
	if err != nil {
		return 0, err
	}
	if err := t.t.Emit(db.Statement.Context, typ, payload); err != nil {
		return 0, err
	}
	return t.t.Seq, nil
}

// Admit admits the session's transaction, begun without an admission, before its
// first write: for jobs that learn their tenant by reading.
func Admit(db *gorm.DB, tenant cells.TenantID, epoch cells.Epoch) error {
	t, err := of(db)
	if err != nil {
		return err
	}
	if err := t.t.Admit(db.Statement.Context, tenant, epoch); err != nil {
		return err
	}
	return t.arm(db.Statement.Context)
}

// AdmitClosed lets the session's transaction import or remove the tenant's rows: see
// the guards' AdmitClosed.
func AdmitClosed(db *gorm.DB, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID) error {
	t, err := of(db)
	if err != nil {
		return err
	}
	if err := t.t.AdmitClosed(db.Statement.Context, tenant, epoch, move); err != nil {
		return err
	}
	t.closed = true
	return t.arm(db.Statement.Context)
}

// admission returns the one of the session: its transaction's, or its context's.
// The error is [guard.ErrNoAdmission].
func (p *Plugin) admission(db *gorm.DB) (guard.Admission, error) {
	if t, ok := db.Statement.ConnPool.(*tx); ok && t.t.Tenant != "" {
		return t.t.Admission, nil
	}
	return guard.AdmissionFrom(db.Statement.Context, true)
}

// Mine is a scope: it adds the condition that the tenant column is the admitted
// tenant. db.Scopes(p.Mine).Where("key = ?", k).Delete(&Note{})
func (p *Plugin) Mine(db *gorm.DB) *gorm.DB {
	a, err := p.admission(db)
	if err != nil {
		_ = db.AddError(err)
		return db
	}
	model := db.Statement.Model
	if model == nil {
		model = db.Statement.Dest
	}
	table := db.Statement.Table
	if table == "" && model != nil {
		if err := db.Statement.Parse(model); err != nil {
			_ = db.AddError(err)
			return db
		}
		table = db.Statement.Table
	}
	column, ok := p.columns[base(table)]
	if !ok {
		_ = db.AddError(fmt.Errorf("%w: gormtx: %q is no tenant table", cells.ErrInvalid, table))
		return db
	}
	return db.Where(clause.Eq{Column: clause.Column{Table: clause.CurrentTable, Name: column}, Value: string(a.Tenant)})
}

// fill gives the admitted tenant to rows of models that name none.
func (p *Plugin) fill(db *gorm.DB) {
	s := db.Statement
	if db.Error != nil || s.Schema == nil {
		return
	}
	column, ok := p.columns[base(s.Schema.Table)]
	field := s.Schema.LookUpField(column)
	if !ok || field == nil {
		return
	}
	a, err := p.admission(db)
	if err != nil {
		return // refused where it is written
	}
	set := func(rv reflect.Value) { _ = db.AddError(setIfZero(s.Context, field, rv, string(a.Tenant))) }
	switch s.ReflectValue.Kind() {
	case reflect.Slice, reflect.Array:
		for i := range s.ReflectValue.Len() {
			set(reflect.Indirect(s.ReflectValue.Index(i)))
		}
	case reflect.Struct:
		set(s.ReflectValue)
	}
}

func setIfZero(ctx context.Context, f *schema.Field, rv reflect.Value, v string) error {
	if rv.Kind() != reflect.Struct {
		return nil
	}
	if _, zero := f.ValueOf(ctx, rv); !zero {
		return nil
	}
	return f.Set(ctx, rv, v)
}

// translate adds the guard's sentinels to an error.
func (p *Plugin) translate(err error) error {
	if err != nil && p.sqlite && strings.Contains(err.Error(), triggerMessage) && !errors.Is(err, cells.ErrFenced) {
		return fmt.Errorf("%w: %w", cells.ErrFenced, err)
	}
	return p.g.Translate(err)
}
