// SPDX-License-Identifier: Apache-2.0

// Package gormtx is the guard for services that use GORM, on Postgres and SQLite.
// It has no tables and no fence of its own: it is a GORM [Plugin] over the guard of
// package postgres ([postgres.SQL]) or sqlite, whose rows are authoritative.
//
//	g, err := postgres.NewSQL(sqlDB, postgres.WithCell("cell-a"))
//	p, err := gormtx.New(g, gormtx.Config{Tables: tables})
//	err = db.Use(p)
//
//	// In a handler; the gate has put the admission into the context.
//	err = p.InTx(r.Context(), db, nil, func(tx *gorm.DB) error {
//		if err := tx.Save(&account).Error; err != nil {
//			return err
//		}
//		return gormtx.Emit(tx, "account.changed", change)
//	})
//	if guard.Refused(w, r, err) {
//		return
//	}
//
// # States of a session
//
//	no admission --reads--> as they are; a write to a tenant table is refused
//	admission --db.Create, Save, Updates, Delete, Exec--> a transaction of its own, behind the fence
//	admission --db.Transaction, Begin--> one transaction, behind the fence; nested ones are savepoints
//
// Whatever a session does ends at its pool of connections, and that is where the
// plugin stands: models, associations, hooks and raw SQL are treated alike. When
// a transaction begins, the admission of its context passes the fence in it. Each
// statement that writes is then looked at:
//
//   - Without an admission a write to a tenant table is refused ([guard.ErrNoAdmission]).
//   - INSERT must give the admitted tenant to each row; an empty field of a model is
//     filled in.
//   - UPDATE and DELETE must have a condition that pins the tenant column to the
//     admitted tenant, in a conjunction: [ErrNoTenantCondition]. [Plugin.Mine] is a scope
//     that adds it.
//   - A write for another tenant is refused with [cells.ErrFenced]. So is every write
//     to the outbox; events are written by [Emit].
//
// What a text does not show (INSERT ... SELECT, functions, the service's own
// triggers) the database refuses, row by row: on Postgres by the guard's triggers,
// on SQLite by temporary triggers that the plugin makes on its connections.
//
// # Failures
//
// Errors that gorm returns carry the guard's sentinels: [guard.NothingWritten],
// [guard.RetryElsewhere] and [guard.RetryHere] tell what to do. The end of the context
// rolls a transaction back unless its commit was sent. A process that dies leaves
// nothing: the database rolls back and frees the fence.
//
// # Caveats
//
//   - GORM's PrepareStmt is refused: it keeps statements away from the pool. pgx caches
//     prepared statements by itself.
//   - db.DB() and db.Connection are ways around the plugin. On Postgres the triggers
//     stand there, too; on SQLite nothing does.
//   - A query that writes (INSERT ... RETURNING through Raw().Rows()) needs an explicit
//     transaction.
//   - Migrations (AutoMigrate) change tables, not rows, and pass.
package gormtx
