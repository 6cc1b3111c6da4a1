// SPDX-License-Identifier: Apache-2.0

package sqlite

import "context"

// ExecForTest runs a statement on the store's connection.
func ExecForTest(ctx context.Context, s *Store, query string) error {
	_, err := s.write.ExecContext(ctx, query)
	return err
}
