// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"log/slog"

	"github.com/cloister-dev/cloister/member/signin"
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
