// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
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

// missing says what a change would not survive; "" when as many synchronous standbys
// stream as the server waits for.
func (s *Store) missing(ctx context.Context) (string, error) {
	var names string
	var streaming, hidden int
	err := s.db.QueryRowContext(ctx, `SELECT current_setting('synchronous_standby_names'),
			count(*) FILTER (WHERE sync_state IN ('sync', 'quorum') AND state = 'streaming'), count(*) FILTER (WHERE sync_state IS NULL)
		FROM pg_stat_replication`).Scan(&names, &streaming, &hidden)
	if err != nil {
		return "", fmt.Errorf("looking for standbys: %w", err)
	}
	n := needed(names)
	switch {
	case n == 0:
		return "the database has no synchronous standby (synchronous_standby_names is empty): what was answered can be lost with the server", nil
	case streaming >= n:
		return "", nil
	case hidden > 0:
		return "the state of the database's standbys cannot be read (grant pg_monitor to the directory's role)", nil
	}
	return fmt.Sprintf("%d of %d synchronous standbys of the database stream: changes wait", streaming, n), nil
}

// standbys fails with kind when changes would not survive the primary, unless that is
// allowed: then it logs an error.
func (s *Store) standbys(ctx context.Context, kind error) error {
	why, err := s.missing(ctx)
	switch {
	case err != nil:
		d := dialect(0, "")
		return d.Translate("standbys", err)
	case why == "":
		return nil
	case s.async:
		s.log.Error("the directory's database is not safe", "why", why)
		return nil
	}
	return fmt.Errorf("directory store: %w: %s", kind, why)
}
