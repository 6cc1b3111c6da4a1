// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"

	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// later attaches a cell beside others. It is enforced from its preparation on and holds
// nothing.
func (r *run) later(ctx context.Context, rows tenancy.Rows) (deploy.Cell, error) {
	if first := r.view.First(); first == nil || first.State != deploy.Serving {
		return r.row, refuse("the first cell does not serve yet; attach it before cell %s", r.Name)
	}
	if rows.Mode != tenancy.Enforced {
		return r.row, refuse("the mode row of cell %s says %s; run cell prepare, which says what to do", r.Name, rows.Mode)
	}
	if err := r.refusals(ctx); err != nil {
		return r.row, err
	}
	fresh := r.row.AttachStartedAt.IsZero()
	if fresh {
		if err := r.empty(ctx); err != nil {
			return r.row, err
		}
	}
	if err := r.done(ctx, StepChecked, "new: %t", fresh); err != nil {
		return r.row, err
	}
	row, err := r.Directory.Attach(ctx, r.Name, wire.Attach{Current: r.self.Current, Next: r.self.Next, KeysFP: r.a.KeysFP, Upstream: r.a.Upstream, Bots: r.a.Bots, Actor: r.Actor})
	if err != nil {
		return r.row, err
	}
	r.row = row
	tenants := configured(&r.self)
	if err := r.done(ctx, StepDirectory, "%d configured tenants placed", len(tenants)); err != nil {
		return r.row, err
	}
	if len(tenants) > 0 {
		if err := r.Rows.Hold(ctx, tenants...); err != nil {
			return r.row, err
		}
	}
	if err := r.done(ctx, StepHeld, "%d tenancy rows", len(tenants)); err != nil {
		return r.row, err
	}
	if err := r.Rows.SetSelf(ctx, r.self); err != nil {
		return r.row, err
	}
	if err := r.done(ctx, StepSelf, "the own row is the directory's"); err != nil {
		return r.row, err
	}
	if err := r.people(ctx); err != nil {
		return r.row, err
	}
	return r.serve(ctx)
}
