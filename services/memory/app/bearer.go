// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"log/slog"
	"net/http"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/signin"
	checks "github.com/cloister-dev/cloister/member/tenancy"
)

// bearers verifies the requests' tokens. The zero value has nobody whom it accepts.
type bearers struct {
	*signin.Verifier
}

// readIssuers reads the issuers' file.
func readIssuers(path string, log *slog.Logger) (b bearers, err error) {
	list, err := signin.ReadIssuers(path)
	if err != nil {
		return b, fmt.Errorf("--issuers: %w", err)
	}
	b.Verifier, err = signin.New(signin.Config{Issuers: list, Log: log})
	return b, err
}

func (b bearers) close() {
	if b.Verifier != nil {
		b.Verifier.Close()
	}
}

// resolve says in which tenant a request acts, by its verified token.
func (b bearers) resolve(r *http.Request) (cells.TenantID, checks.Principal, error) {
	if b.Verifier == nil {
		return "", checks.Principal{}, &cells.Answer{Code: cells.CodeUnauthenticated, Detail: "nothing verifies credentials here"}
	}
	return b.Verifier.Resolve(r)
}
