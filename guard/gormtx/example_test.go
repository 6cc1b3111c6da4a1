// SPDX-License-Identifier: Apache-2.0

package gormtx_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	gormsqlite "gorm.io/driver/sqlite"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
	_ "modernc.org/sqlite"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/gormtx"
	"github.com/cloister-dev/cloister/guard/sqlite"
)

// Account is a tenant table as a model: the tag names the tenant.
type Account struct {
	Tenant string `gorm:"primaryKey" cell:"tenant"`
	Key    string `gorm:"primaryKey"`
	Name   string
}

// A service that uses GORM on SQLite without cgo: GORM's dialect over modernc's
// driver.
func Example() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	sqlDB, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "cell.db")+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)&_txlock=immediate")
	if err != nil {
		panic(err)
	}
	defer sqlDB.Close()
	db, err := gorm.Open(gormsqlite.Dialector{Conn: sqlDB}, &gorm.Config{Logger: logger.Discard})
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	must := func(err error) {
		if err != nil {
			panic(err)
		}
	}
	must(db.AutoMigrate(&Account{}))
	tables, err := gormtx.TablesOf(db, &Account{})
	must(err)
	g, err := sqlite.New(sqlDB, sqlite.WithCell("cell-a"))
	must(err)
	defer g.Close()
	must(g.Install(ctx, tables)) // in a cell, the member does it
	p, err := gormtx.New(g, gormtx.Config{Tables: tables})
	must(err)
	must(db.Use(p))
	must(g.OpenFence(ctx, cells.FenceOrder{Tenant: "acme", Epoch: 1, Floor: 1})) // the member, too

	// In a service the gate has put the admission into the request's context.
	request := guard.ContextWith(ctx, guard.Admission{Tenant: "acme", Epoch: 1})
	err = p.InTx(request, db, nil, func(tx *gorm.DB) error {
		if err := tx.Create(&Account{Key: "main", Name: "Acme"}).Error; err != nil {
			return err
		}
		seq, err := gormtx.Emit(tx, "account.made", nil)
		fmt.Println("event", seq)
		return err
	})
	fmt.Println("written:", err)
	err = db.WithContext(request).Where("key = ?", "main").Delete(&Account{}).Error
	fmt.Println("no tenant:", errors.Is(err, gormtx.ErrNoTenantCondition))
	err = db.WithContext(request).Scopes(p.Mine).Where("key = ?", "main").Delete(&Account{}).Error
	fmt.Println("mine:", err)
	err = db.WithContext(ctx).Create(&Account{Tenant: "acme", Key: "x"}).Error
	fmt.Println("no admission:", errors.Is(err, guard.ErrNoAdmission))
	// Output:
	// event 1
	// written: <nil>
	// no tenant: true
	// mine: <nil>
	// no admission: true
}
