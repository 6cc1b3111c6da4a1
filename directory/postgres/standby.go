// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/cloister-dev/cloister/cells"
)

var wanted = regexp.MustCompile(`(?i)^\s*(?:first\s+|any\s+)?([0-9]+)\s*\(`)

// needed is how many synchronous standbys a value of synchronous_standby_names
// waits for.
func needed(names string) int {
	if strings.TrimSpace(names) == "" {
		return 0
	}
	if m := wanted.FindStringSubmatch(names); m != nil {
		if n, err := strconv.Atoi(m[1]); err == nil {
			return n
		}
	}
	return 1
}

// durability is what a change survives. amiss is "" when as many synchronous standbys
// stream as the server waits for, else it says what is amiss; passing says that it may
// pass: the server waits for standbys that are away, so nothing that was answered can
// be lost.
type durability struct {
	amiss   string
	passing bool
}

func (s *Store) durability(ctx context.Context) (durability, error) {
	var names string
	var streaming, hidden int
	err := s.db.QueryRowContext(ctx, `SELECT current_setting('synchronous_standby_names'),
			count(*) FILTER (WHERE sync_state IN ('sync', 'quorum') AND state = 'streaming'), count(*) FILTER (WHERE sync_state IS NULL)
		FROM pg_stat_replication`).Scan(&names, &streaming, &hidden)
	if err != nil {
		d := dialect(0, "")
		return durability{}, d.Translate("standbys", err)
	}
	n := needed(names)
	switch {
	case n == 0:
		return durability{amiss: "the database has no synchronous standby (synchronous_standby_names is empty): what was answered can be lost with the server"}, nil
	case streaming >= n:
		return durability{}, nil
	case hidden > 0:
		return durability{amiss: "the state of the database's standbys cannot be read (grant pg_monitor to the directory's role)"}, nil
	}
	return durability{amiss: fmt.Sprintf("%d of %d synchronous standbys of the database stream: changes wait", streaming, n), passing: true}, nil
}

// required fails with [cells.ErrInvalid] when changes would not survive the primary,
// unless that is allowed; then, and while a standby is away, it logs an error.
func (s *Store) required(ctx context.Context) error {
	d, err := s.durability(ctx)
	if err != nil || d.amiss == "" {
		return err
	}
	if s.async || d.passing {
		s.log.Error("the directory's database is not safe", "why", d.amiss)
		return nil
	}
	return fmt.Errorf("directory store: %w: %s", cells.ErrInvalid, d.amiss)
}

// ready fails with [cells.ErrUnavailable] while changes wait for a standby, or would
// not survive the primary, unless that is allowed: then it logs an error.
func (s *Store) ready(ctx context.Context) error {
	d, err := s.durability(ctx)
	if err != nil || d.amiss == "" {
		return err
	}
	if s.async {
		s.log.Error("the directory's database is not safe", "why", d.amiss)
		return nil
	}
	return fmt.Errorf("directory store: %w: %s", cells.ErrUnavailable, d.amiss)
}
