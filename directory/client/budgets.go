// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// Budgets tells everybody's limit and those that tenants have of their own.
// NOT_SERVED when the directory keeps no budgets, as of all methods here.
func (c *Client) Budgets(ctx context.Context) (api.BudgetList, error) {
	var out api.BudgetList
	_, err := c.call(ctx, request{method: http.MethodGet, path: api.PathBudgets}, &out)
	return out, err
}

// Budget tells the state of a tenant's budget; every tenant has one.
func (c *Client) Budget(ctx context.Context, t cells.TenantID) (cells.BudgetAccount, error) {
	var out cells.BudgetAccount
	if err := t.Validate(); err != nil {
		return out, err
	}
	_, err := c.call(ctx, request{method: http.MethodGet, path: budgetPath(t)}, &out)
	return out, err
}

// SetBudget sets the limit of a tenant, or with tenant "" of everybody.
func (c *Client) SetBudget(ctx context.Context, t cells.TenantID, spec api.BudgetSpec) (api.BudgetLimit, error) {
	var out api.BudgetLimit
	if t != "" {
		if err := t.Validate(); err != nil {
			return out, err
		}
	}
	_, err := c.call(ctx, request{method: http.MethodPut, path: budgetPath(t), body: spec}, &out)
	return out, err
}

// ResetBudget removes what SetBudget has set. NOT_FOUND when nothing was.
func (c *Client) ResetBudget(ctx context.Context, t cells.TenantID, actor string) error {
	if t != "" {
		if err := t.Validate(); err != nil {
			return err
		}
	}
	q := url.Values{}
	set(q, "actor", actor)
	_, err := c.call(ctx, request{method: http.MethodDelete, path: budgetPath(t), query: q}, &struct{}{})
	return err
}

func budgetPath(t cells.TenantID) string {
	if t == "" {
		return api.PathBudgets
	}
	return api.PathBudgets + "/" + url.PathEscape(string(t))
}
