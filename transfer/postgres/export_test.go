// SPDX-License-Identifier: Apache-2.0

package postgres

import "time"

// Faults makes f run at each point of a capture's making and ending at which a crash
// would leave something behind; an error ends the step there.
func (s *Store) Faults(f func(point string) error) { s.faults = f }

// Stall sets from when on a member holds up its group.
func (s *Store) Stall(bytes uint64, after time.Duration) {
	s.stall = stallBounds{bytes: bytes, move: after, back: after}
}

// Reads reports whether this store reads for a group.
func (s *Store) Reads() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.hubs) > 0
}

// Patience sets from when on an open transaction is named by Check.
func (s *Store) Patience(d time.Duration) { s.patience = d }
