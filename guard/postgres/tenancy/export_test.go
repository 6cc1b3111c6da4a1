// SPDX-License-Identifier: Apache-2.0

package tenancy

import "context"

// Stall runs f in each write of the mode, between the lock and the commit.
func (s *Store) Stall(f func(ctx context.Context, try int)) { s.stall = f }
