// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/member/signin"
	"github.com/cloister-dev/cloister/member/signin/postgres"
	"github.com/cloister-dev/cloister/member/signin/signintest"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

func TestStore(t *testing.T) {
	signintest.Run(t, func(t *testing.T) signin.Store {
		s, err := postgres.Open(t.Context(), pgtest.DB(t), postgres.Options{Checked: true})
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
}

func TestOpenRefuses(t *testing.T) {
	if _, err := postgres.Open(t.Context(), "postgres://u:hunter2@[", postgres.Options{}); !errors.Is(err, cells.ErrInvalid) || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("a malformed address: %v", err)
	}
	if _, err := postgres.Open(t.Context(), "postgres://u:hunter2@127.0.0.1:1/x", postgres.Options{}); !errors.Is(err, cells.ErrUnavailable) || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("nobody there: %v", err)
	}
}
