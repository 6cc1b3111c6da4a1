// SPDX-License-Identifier: Apache-2.0

package gormtx

import (
	"errors"

	"gorm.io/gorm"
)

const (
	fillName      = "cloister:fill"
	beginName     = "cloister:begin"
	endName       = "cloister:end"
	translateName = "cloister:translate"
	startedKey    = "cloister:started"
)

// register puts the plugin's callbacks among GORM's: rows of models get their
// tenant, what writes runs in a transaction also where GORM's own are switched off,
// and errors get the guard's sentinels.
func (p *Plugin) register(db *gorm.DB) error {
	cb := db.Callback()
	return errors.Join(
		cb.Create().Before("gorm:create").Register(fillName, p.fill),
		cb.Create().Before("*").Register(beginName, p.begin),
		cb.Update().Before("*").Register(beginName, p.begin),
		cb.Delete().Before("*").Register(beginName, p.begin),
		cb.Query().Before("*").Register(beginName, p.beginQuery),
		cb.Create().After("*").Register(endName, p.end),
		cb.Update().After("*").Register(endName, p.end),
		cb.Delete().After("*").Register(endName, p.end),
		cb.Query().After("*").Register(endName, p.end),
		cb.Row().After("*").Register(translateName, p.translated),
		cb.Raw().After("*").Register(translateName, p.translated),
	)
}

// begin begins a transaction where GORM does not.
func (p *Plugin) begin(db *gorm.DB) {
	if db.Error != nil || db.DryRun || !db.SkipDefaultTransaction {
		return
	}
	p.start(db)
}

// beginQuery begins one for raw SQL that writes and is read to its end at once.
func (p *Plugin) beginQuery(db *gorm.DB) {
	if db.Error == nil && !db.DryRun && len(writes(db.Statement.SQL.String())) > 0 {
		p.start(db)
	}
}

func (p *Plugin) start(db *gorm.DB) {
	if _, outside := db.Statement.ConnPool.(*pool); !outside {
		return
	}
	own := db.Begin()
	if own.Error != nil {
		_ = db.AddError(own.Error)
		return
	}
	db.Statement.ConnPool = own.Statement.ConnPool
	db.InstanceSet(startedKey, true)
}

// end ends what begin began.
func (p *Plugin) end(db *gorm.DB) {
	if _, started := db.InstanceGet(startedKey); started {
		if db.Error != nil {
			db.Rollback()
		} else {
			db.Commit()
		}
		db.Statement.ConnPool = db.ConnPool
	}
	p.translated(db)
}

func (p *Plugin) translated(db *gorm.DB) { db.Error = p.translate(db.Error) }
