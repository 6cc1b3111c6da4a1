// SPDX-License-Identifier: Apache-2.0

package postgres

import "time"

// Faults makes f run at each point of a capture's making and ending at which a crash
// would leave something behind; an error ends the step there.
func (s *Store) Faults(f func(point string) error) { s.faults = f }

// Patience sets from when on an open transaction is named by Check.
func (s *Store) Patience(d time.Duration) { s.patience = d }
