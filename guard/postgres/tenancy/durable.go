// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"context"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
)

// Durable is nil when commits wait for at least one synchronous standby that streams
// now. Otherwise the error says what is amiss and wraps [cells.ErrInvalid].
func (s *Store) Durable(ctx context.Context) error {
	var names, commit string
	var streaming, hidden int
	err := s.pool.QueryRow(ctx, `SELECT current_setting('synchronous_standby_names'), current_setting('synchronous_commit'),
			count(*) FILTER (WHERE sync_state IN ('sync', 'quorum') AND state = 'streaming'), count(*) FILTER (WHERE pid IS NOT NULL AND sync_state IS NULL)
		FROM pg_stat_replication`).Scan(&names, &commit, &streaming, &hidden)
	if err != nil {
		return fmt.Errorf("tenancy: looking at the standbys: %w", translate(err))
	}
	switch {
	case names == "":
		return fmt.Errorf("%w: it has no synchronous standby (synchronous_standby_names is empty), so what it answered can be lost with it", cells.ErrInvalid)
	case commit == "off" || commit == "local":
		return fmt.Errorf("%w: synchronous_commit is %s, so commits wait for no standby", cells.ErrInvalid, commit)
	case streaming == 0 && hidden > 0:
		return fmt.Errorf("%w: the state of its standbys cannot be read; grant the role pg_read_all_stats", cells.ErrInvalid)
	case streaming == 0:
		return fmt.Errorf("%w: no synchronous standby streams", cells.ErrInvalid)
	}
	return nil
}
