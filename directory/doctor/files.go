// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/cloister-dev/cloister/channel/pki"
	"github.com/cloister-dev/cloister/internal/credential"
)

func fileChecks() []Check {
	return []Check{
		{ID: "certificates", Scope: ScopeFiles, Worst: Error, run: checkCertificates,
			Looks: "Each certificate file, and the CA's, is valid now and for a while, of this CA, and not revoked.",
			Fix:   "cell pki renew CERT KEY; processes take it over without a restart"},
		{ID: "router-token", Scope: ScopeFiles, Worst: Error, run: checkToken,
			Looks: "CELL_ROUTER_TOKEN, where it is set, is lcr_ and 128 lowercase hexadecimal digits.",
			Fix:   "make one with cell credential new"},
	}
}

func checkCertificates(_ context.Context, x *exam) (out []Finding, _ error) {
	now := x.o.Now()
	var errs []error
	files := x.src.Certificates
	if x.src.CA != "" {
		files = append([]string{x.src.CA}, files...)
	}
	for _, f := range files {
		ca, revoked := x.src.CA, x.src.Revoked
		if f == ca {
			ca, revoked = "", ""
		}
		if _, err := os.Stat(revoked); err != nil {
			revoked = ""
		}
		info, err := pki.Inspect(f, ca, revoked, now)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		who := info.Identity
		if info.CA {
			who = "the CA"
		}
		problems := info.Problems
		if f == x.src.CA {
			problems = nil
		}
		left := info.NotAfter.Sub(now)
		switch {
		case left <= 0:
			out = append(out, Finding{Message: fmt.Sprintf("%s (%s) has ended on %s", f, who, info.NotAfter.UTC().Format("2006-01-02"))})
		case len(problems) > 0:
			out = append(out, Finding{Message: fmt.Sprintf("%s (%s) is refused: %s", f, who, strings.Join(problems, "; "))})
		case left < x.o.Expiry:
			out = append(out, Finding{Severity: Warning, Message: fmt.Sprintf("%s (%s) ends on %s", f, who, info.NotAfter.UTC().Format("2006-01-02"))})
		}
	}
	return out, errors.Join(errs...)
}

func checkToken(_ context.Context, x *exam) ([]Finding, error) {
	if x.src.RouterToken == "" {
		return nil, nil
	}
	if err := credential.Router.Check(x.src.RouterToken); err != nil {
		return []Finding{{Message: "CELL_ROUTER_TOKEN has another form"}}, nil
	}
	return nil, nil
}
