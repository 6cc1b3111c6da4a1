// SPDX-License-Identifier: Apache-2.0

package tenancy_test

import (
	"testing"
	"time"

	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

// Rows of the version before are read as they are, and get what they lack from the next
// start; what is there stays.
func TestRowsOfTheVersionBefore(t *testing.T) {
	d := cell(t, pgtest.DB(t), tenancy.Recording)
	s := d.store()
	db := connect(t, d.dsn)
	exec(t, db, `ALTER TABLE held.heartbeats DROP COLUMN cache_ms, DROP COLUMN settings`, `UPDATE held.tenancy_meta SET version = 1`,
		`INSERT INTO held.heartbeats (instance, workers, at) VALUES ('older', false, clock_timestamp())`)
	h := tenancy.Heartbeat{Instance: "newer", CacheFor: 2 * time.Second, Settings: tenancy.Settings{"drain": "5s"}}
	if err := s.Beat(t.Context(), h); err == nil {
		t.Error("a heartbeat of this build without an installation")
	}
	if live, err := s.Heartbeats(t.Context(), time.Minute); err != nil || len(live) != 1 || live[0].CacheFor != 0 {
		t.Errorf("before: %+v, %v", live, err)
	}
	before, err := s.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.Install(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Beat(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	live, err := s.Heartbeats(t.Context(), time.Minute)
	if err != nil || len(live) != 2 || live[0].CacheFor != h.CacheFor || live[1].CacheFor != 0 || live[0].Settings["drain"] != "5s" || live[1].Settings != nil {
		t.Errorf("after: %+v, %v", live, err)
	}
	if rows, err := s.Read(t.Context()); err != nil || rows.State() != before.State() || rows.State() != tenancy.StateRecording {
		t.Errorf("the rows were %+v and are %+v, %v", before, rows, err)
	}
	// What a build after this one has installed stays.
	exec(t, db, `UPDATE held.tenancy_meta SET version = 99`, `ALTER TABLE held.heartbeats ADD COLUMN later text`)
	if err := s.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	var v int
	if err := db.QueryRow(t.Context(), `SELECT version FROM held.tenancy_meta`).Scan(&v); err != nil || v != 99 {
		t.Errorf("version %d, %v", v, err)
	}
	if err := s.Beat(t.Context(), h); err != nil {
		t.Errorf("a heartbeat in a later build's rows: %v", err)
	}
}
