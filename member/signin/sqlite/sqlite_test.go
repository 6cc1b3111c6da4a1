// SPDX-License-Identifier: Apache-2.0

package sqlite_test

import (
	"path/filepath"
	"testing"

	"github.com/cloister-dev/cloister/member/signin"
	"github.com/cloister-dev/cloister/member/signin/signintest"
	"github.com/cloister-dev/cloister/member/signin/sqlite"
)

func TestStore(t *testing.T) {
	signintest.Run(t, func(t *testing.T) signin.Store {
		path := filepath.Join(t.TempDir(), "s.db")
		s, err := sqlite.Open(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if s, err = sqlite.Open(t.Context(), path); err != nil {
			t.Fatal(err)
		}
		return s
	})
}
