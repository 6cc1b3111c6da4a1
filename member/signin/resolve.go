// SPDX-License-Identifier: Apache-2.0

package signin

import (
	"context"
	"net/http"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/tenancy"
)

// HeaderTenant names a request's tenant. A token that is scoped to one acts in no
// other, whatever the header says.
const HeaderTenant = "X-Tenant"

// Bearer returns a request's bearer token. The error is UNAUTHENTICATED: there is
// none, more than one Authorization header, or one of another scheme.
func Bearer(h http.Header) (string, error) {
	list := h.Values("Authorization")
	if len(list) == 1 {
		if scheme, tok, _ := strings.Cut(list[0], " "); strings.EqualFold(scheme, "Bearer") && tok != "" && !strings.ContainsAny(tok, " \t,") {
			return tok, nil
		}
	}
	return "", &cells.Answer{Code: cells.CodeUnauthenticated, Detail: "want one Authorization header with a bearer token"}
}

// Resolve verifies a request's bearer token and says in which tenant it acts: the
// token's, unless X-Tenant names another, which the check then refuses. It is what
// [tenancy.HTTP] wants.
func (v *Verifier) Resolve(r *http.Request) (cells.TenantID, tenancy.Principal, error) {
	return Resolve(r, v.Principal)
}

// Principal verifies a token and says whom it stands for.
func (v *Verifier) Principal(ctx context.Context, raw string) (tenancy.Principal, error) {
	t, err := v.Verify(ctx, raw)
	if err != nil {
		return tenancy.Principal{}, err
	}
	return tenancy.Principal{Tenant: t.Tenant, Subject: t.Subject}, nil
}

// Resolve is [Verifier.Resolve] for what verifies otherwise, or more.
func Resolve(r *http.Request, verify func(context.Context, string) (tenancy.Principal, error)) (cells.TenantID, tenancy.Principal, error) {
	raw, err := Bearer(r.Header)
	if err != nil {
		return "", tenancy.Principal{}, err
	}
	who, err := verify(r.Context(), raw)
	if err != nil {
		return "", tenancy.Principal{}, err
	}
	tenant := who.Tenant
	if named := r.Header.Values(HeaderTenant); len(named) > 0 {
		if len(named) > 1 {
			return "", tenancy.Principal{}, &cells.Answer{Code: cells.CodeBadRequest, Detail: HeaderTenant + " is there twice"}
		}
		tenant = cells.TenantID(named[0])
	}
	return tenant, who, nil
}
